"""Devices that are described, and the numbers that a dry run tells of them."""

from __future__ import annotations

import importlib.metadata

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import targets
from qrag_jax.runtime.dry_run import fit
from qrag_jax.runtime.targets import PLUGIN, TARGETS, described_devices


@pytest.mark.parametrize("name", ["b9", "h100x0", "h100x", "x8", "h100 x8", "H100", ""])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"such as h100x8 \(known: h100\)"):
        described_devices(name)


def has_plugin() -> bool:
    try:
        return bool(importlib.metadata.version(PLUGIN))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(has_plugin(), reason="the CUDA packages are here")
def test_without_the_packages_it_says_how_to_get_them() -> None:
    with pytest.raises(InputError, match=r"jax\[cuda12\] are needed; `make gpu` makes"):
        described_devices("h100x8")


def test_packages_of_another_jax_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: "0.4.1")
    with pytest.raises(InputError, match=rf"{PLUGIN} is 0\.4\.1, but jax is .*must be equal"):
        described_devices("h100")


def test_what_fits_is_told_with_what_is_missing() -> None:
    target = TARGETS["h100"]
    assert fit(2**30, target) == "fits: 1.0 GiB of 79.1 GiB, 8% of which are kept free"
    room = int(0.92 * target.memory)
    assert fit(room, target).startswith("fits: ")
    told = fit(room + 3 * 2**30, target)
    assert told.startswith("does not fit: 75.8 GiB of 79.1 GiB")
    assert "3.0 GiB too much" in told
    assert "--config.encoder.block_tokens" in told

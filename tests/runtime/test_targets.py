"""Devices that are described, and the numbers that a dry run tells of them."""

from __future__ import annotations

import importlib.metadata

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import targets
from qrag_jax.runtime.dry_run import fit
from qrag_jax.runtime.targets import (
    LIBTPU,
    PLUGINS,
    TARGETS,
    check_packages,
    described_devices,
)


@pytest.mark.parametrize("name", ["b9", "h100x0", "h100x", "x8", "h100 x8", "H100", ""])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"such as h100x8 \(known: h100, v5e, v6e\)"):
        described_devices(name)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("h100x12", "hosts have 8 GPUs; give fewer than that or a multiple of it"),
        ("v5ex3", "stand in rectangles; give 1, 4, 8, 16, 32, 64, 128 or 256 of them"),
        ("v6ex512", "stand in rectangles"),
    ],
)
def test_numbers_in_which_devices_do_not_come_are_refused(name: str, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        described_devices(name)


def has(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(any(map(has, PLUGINS)), reason="the CUDA packages are here")
def test_without_the_packages_it_says_how_to_get_them() -> None:
    with pytest.raises(InputError, match=r"qrag_jax\[cuda12\]"):
        described_devices("h100x8")


@pytest.mark.parametrize(("name", "package"), [("h100", PLUGINS[0]), ("v5e", LIBTPU)])
def test_packages_of_another_jax_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: "0.4.1")
    with pytest.raises(InputError, match=rf"{package} is 0\.4\.1, but jax .* needs \d"):
        described_devices(name)


@pytest.mark.parametrize(
    ("found", "accepted"), [("0.0.42", True), ("0.0.42.1", True), ("0.0.421", False)]
)
def test_any_patch_of_the_libtpu_that_jax_names_is_accepted(monkeypatch, found, accepted) -> None:
    needed = ["numpy>=2.0", 'libtpu==0.0.42.*; extra == "tpu"']
    monkeypatch.setattr(targets.importlib.metadata, "requires", lambda name: needed)
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: found)
    if accepted:
        check_packages("tpu")
    else:
        with pytest.raises(InputError, match=r"libtpu is 0\.0\.421, .* needs 0\.0\.42;"):
            check_packages("tpu")


def test_what_fits_is_told_with_what_is_missing() -> None:
    target = TARGETS["h100"]
    assert fit(2**30, target) == "fits: 1.0 GiB of 79.1 GiB, 8% of which are kept free"
    room = int(0.92 * target.memory)
    assert fit(room, target).startswith("fits: ")
    told = fit(room + 3 * 2**30, target, "q_rag")
    assert told.startswith("does not fit: 75.8 GiB of 79.1 GiB")
    assert "3.0 GiB too much" in told
    assert "--config.encoder.block_tokens" in told

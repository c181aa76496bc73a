"""Devices that are described, and the numbers that a dry run tells of them."""

from __future__ import annotations

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.dry_run import fit
from qrag_jax.runtime.targets import TARGETS, described_devices


@pytest.mark.parametrize(
    "name",
    ["b9", "h100x0", "h100x", "x8", "h100 x8", "H100", "", "h100x12", "v5ex3", "v6ex512"],
)
def test_unknown_devices_and_numbers_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="--for"):
        described_devices(name)


def test_what_fits_is_told_with_what_is_missing() -> None:
    target = TARGETS["h100"]
    room = int(0.92 * target.memory)
    assert fit(room, target).startswith("fits: ")
    told = fit(room + 3 * 2**30, target, "q_rag")
    assert "3.0 GiB too much" in told
    assert "--config.encoder.block_tokens" in told

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from benchmarks import measure
from qrag_jax.runtime import process


@pytest.mark.parametrize(("platform", "unit"), [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_without_proc(
    platform: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """getrusage tells KiB on Linux and bytes on macOS."""
    monkeypatch.setattr(process, "STATUS", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", platform)
    least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert least <= measure.peak_memory(ours=True) < least + 64 * 2**10 * unit

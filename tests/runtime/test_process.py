from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qrag_jax.runtime import process

AGE = """
import time
time.sleep(0.3)
from qrag_jax.runtime.process import process_age
first = process_age()
time.sleep(0.2)
print(first, process_age() - first)
"""


def test_age_counts_from_the_creation_of_the_process() -> None:
    before = time.monotonic()
    out = subprocess.run([sys.executable, "-c", AGE], capture_output=True, text=True, check=True)
    lived = time.monotonic() - before
    age, passed = map(float, out.stdout.split())
    # Also what came before the module's import is counted where the system tells it.
    assert (0.3 if sys.platform == "linux" else 0.0) <= age <= lived
    assert 0.2 <= passed <= lived


PEAK = """
import numpy as np
from qrag_jax.runtime.process import PeakMemory
before = PeakMemory()
small = before.mebibytes()
np.ones(100 * 2**20, np.uint8).sum()
large = before.mebibytes()
print(small, large, PeakMemory().mebibytes())
"""


def test_peak_memory_counts_what_was_given_back() -> None:
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    small, large, anew = map(float, out.stdout.split())
    assert small + 90 < large < small + 150
    # Linux forgets an earlier peak.
    assert anew < large - 90 if sys.platform == "linux" else anew >= large


@pytest.mark.parametrize(("platform", "unit"), [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_without_proc(
    platform: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """getrusage gives KiB on Linux and bytes on macOS."""
    monkeypatch.setattr(process, "STATUS", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", platform)
    least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert least <= process.peak_bytes() < least + 64 * 2**10 * unit

from __future__ import annotations

import subprocess
import sys
import time

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

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

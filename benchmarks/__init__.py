"""The benchmarks of the package; `python -m benchmarks --suite NAME` runs one suite."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(os.environ.get("QRAG_DATA", "../shared/data"))  # the folder of all data sets
INVENTED = "examples/worlds/records.py:large_hotpotqa"  # what stands in for HotpotQA

"""The process a run lives in: how old it is."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()


def process_age() -> float:
    """Seconds since this process was created, so with Python's start and every import.

    Linux tells it to a hundredth; elsewhere it is counted from the import of this module.
    """
    try:
        # proc_pid_stat(5): field 22, after the name in parentheses, is the start in clock ticks.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return time.monotonic() - _IMPORTED

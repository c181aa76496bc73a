"""The process a run lives in: how old it is, how much memory it took."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
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


class PeakMemory:
    """The most memory this process held since the object was made.

    Linux starts the peak anew; elsewhere it is that of the whole process so far.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def mebibytes(self) -> float:
        """The peak in MiB."""
        status = Path("/proc/self/status")
        if status.exists():
            for line in status.read_text().splitlines():
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) / 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)

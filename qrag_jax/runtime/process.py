"""Tells the age and the peak memory of this process."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from pathlib import Path

STATUS = Path("/proc/self/status")
_IMPORTED = time.monotonic()


def process_age() -> float:
    """Seconds since this process was created, including Python's start and every import.

    On Linux it is exact to a hundredth of a second. Elsewhere it counts from the import of this
    module.
    """
    try:
        # proc_pid_stat(5): field 22, after the name in parentheses, is the start in clock ticks.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return time.monotonic() - _IMPORTED


def peak_bytes() -> int:
    """The peak memory of this process, in bytes, since its start or since the peak was reset."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


class PeakMemory:
    """The peak memory of this process since the object was made.

    On Linux the object resets the peak. Elsewhere the peak is that of the whole process so far.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def mebibytes(self) -> float:
        """The peak in MiB."""
        return peak_bytes() / 2**20

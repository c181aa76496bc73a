"""Reads the log of a vLLM server: its last lines, and the first error in it.

When an engine fails, vLLM's parent process writes a long traceback after the child's, which tells
nothing but that the child failed ("See root cause above"). So the last lines alone hide the cause.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

LAST_LINES = 15  # shown when the server dies
READ_BYTES = 1 << 16  # at each end of what the present process wrote
LONGEST_ERROR = 600  # characters

# An exception's last line, with or without vLLM's own words before it, such as
# "(EngineCore pid=1) ERROR 11-26 09:10:12 [core.py:1510] ValueError: …".
_ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception|Exit)): (\S.*)")


class ServerLog:
    """The log file of one server.

    Attributes:
        path: of the file.
        start: where in it the present process began, in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0

    def tail(self, count: int) -> list[str]:
        """The last lines that the present process wrote, without blank ones."""
        return self._lines(from_end=True)[-count:]

    def first_error(self) -> str:
        """The first exception that the present process wrote, as `Name: what it says`; "": none."""
        for line in self._lines(from_end=False):
            if found := _ERROR.search(line):
                return f"{found[1]}: {found[2]}"[:LONGEST_ERROR]
        return ""

    def last_words(self) -> str:
        """The first error and the last lines, in words for a message."""
        error = self.first_error()
        lines = "".join(f"\n    {line}" for line in self.tail(LAST_LINES))
        first = f"the first error in its log is {error}; " if error else ""
        return f"{first}the last lines of its log {self.path}:{lines}"

    def _lines(self, from_end: bool) -> list[str]:
        with contextlib.suppress(OSError), self.path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.start, size - READ_BYTES) if from_end else self.start)
            lines = log.read(READ_BYTES).decode("utf-8", "replace").splitlines()
            return [line.strip() for line in lines if line.strip()]
        return []

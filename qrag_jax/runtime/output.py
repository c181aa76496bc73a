"""Standard output and error that may be closed while a command goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

# The reader of a pipe is gone (`| head`); the terminal is.
_GONE = (errno.EPIPE, errno.EIO)


class LastingOutput:
    """A text stream whose reader may go away: what is written from then on goes nowhere.

    The file descriptor itself is turned to the null device, so that what Python or a library
    still writes to it fails no more. Other errors, a full disk say, are raised as ever.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or drops what nobody reads."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        """As `write`, line by line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes, or drops what nobody reads."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def _give_up(self, error: OSError) -> None:
        if error.errno not in _GONE:
            raise error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        self._stream.flush()  # what it had buffered


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """While entered, `sys.stdout` and `sys.stderr` are such streams, also if closed from the start.

    A command that was started by a pipe or a terminal that goes away works on, and writes its
    files.
    """
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name) or stack.enter_context(open(os.devnull, "w"))
            setattr(sys, name, cast(TextIO, LastingOutput(stream)))
        ours = sys.stdout, sys.stderr
        try:
            yield
        finally:
            for stream in ours:
                stream.flush()
            sys.stdout, sys.stderr = before

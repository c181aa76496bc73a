"""Lets a command go on when its standard output or standard error is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO, cast

# EPIPE: the reader of a pipe is gone (`| head`). EIO: the terminal is gone.
_GONE = (errno.EPIPE, errno.EIO)
_SETTLES = 0.05  # seconds in which a write that has begun ends


class LastingOutput:
    """A text stream whose reader may go away; later output is then dropped.

    The file descriptor itself is redirected to the null device, so later writes by Python or by a
    library do not fail. Other errors, such as a full disk, are raised as usual. A character that
    the terminal's encoding has not is written as Python's escape.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except OSError as error:
            if error.errno not in _GONE:
                raise
            _silence(self._stream.fileno())
            self._stream.flush()  # the buffered text goes to the null device


def end_process(line: str, status: int) -> NoReturn:
    """Ends the process at once; `line`, after a blank line, is the last one on standard error.

    No thread is waited for. What threads write later, in Python or in a library of another
    language, goes to the null device.
    """
    with contextlib.suppress(OSError):  # nobody may read it
        ours = os.dup(sys.stderr.fileno())
        _silence(sys.stderr.fileno())
        time.sleep(_SETTLES)
        # A thread may be in the middle of a line.
        os.write(ours, f"\n{line}\n".encode(errors="backslashreplace"))
    os._exit(status)


def _silence(descriptor: int) -> None:
    """Redirects a file descriptor to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Makes `sys.stdout` and `sys.stderr` such streams, even if they were closed at the start."""
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

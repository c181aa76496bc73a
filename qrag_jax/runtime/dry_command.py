"""`--dry_run` of a command: it does all that it does before its work, tells the work, and ends.

A command, or what it calls, marks with `begins` where its checks end and its work begins. In a dry
run nothing behind the mark is reached. What would write before the mark asks `asked`, or writes
`aside`. `train` has a dry run of its own, which also compiles (`runtime.dry_run`).
"""

from __future__ import annotations

import atexit
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

FLAG = "dry_run"
HELP = "Check everything, say what would be done, and end; nothing is written."

_ASKED = [False]  # of the whole process: threads must see it, which they do not of a ContextVar


class Ended(Exception):
    """A dry run has come to the work."""


@contextlib.contextmanager
def dry(is_asked: bool = True) -> Iterator[None]:
    """In this block, commands make a dry run if `is_asked`."""
    _ASKED.append(is_asked)
    try:
        yield
    finally:
        _ASKED.pop()


def asked() -> bool:
    """Whether this is a dry run."""
    return _ASKED[-1]


def begins(*lines: str) -> None:
    """Marks where a command's work begins; without a dry run it does nothing.

    Args:
        lines: what the work would be: what is read and written, how much is computed or asked.

    Raises:
        Ended: this is a dry run; the lines are printed.
    """
    if asked():
        print("\n".join([*lines, "dry run: nothing was written"]))
        raise Ended


def aside(folder: Path) -> Path:
    """The folder itself; in a dry run a temporary one in its place, which the process deletes."""
    if not asked():
        return folder
    place = tempfile.TemporaryDirectory()
    atexit.register(place.cleanup)
    return Path(place.name) / "aside"

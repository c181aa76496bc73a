"""Reads files of unknown origin within limits, so that no line and no file exhausts the memory.

A line without an end, or a few kilobytes of gzip that unpack to terabytes, raise a one-sentence
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qrag_jax.errors import InputError

MAX_LINE_BYTES = 64 * 2**20  # a document of 10M tokens has about 45 MB
MAX_WHOLE_BYTES = 4 * 2**30  # the largest official file has 0.7 GB
MAX_EXPANSION = 200  # of gzip; text unpacks to 3 to 10 times its size, a bomb to 1,000 times
_PIECE = 2**24


def lines(file: BinaryIO, path: Path, fix: str) -> Iterator[bytes]:
    """The lines of an open file, with their line ends.

    Args:
        file: the open file.
        path: the file's path, for the error.
        fix: says in the error what the user can do.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise InputError(
                f"{path}, line {number}, is longer than {MAX_LINE_BYTES >> 20} MiB; {fix}"
            )
        yield line


def to_append(path: Path, fix: str) -> BinaryIO | None:
    """A log that grows, open to be read and cut; None if there is none yet.

    Args:
        fix: says in the error what the user can do.
    """
    if not path.exists():
        return None
    try:
        return path.open("rb+")
    except OSError as error:
        raise InputError(f"{path} cannot be opened ({error.strerror}); {fix}.") from None


def whole(file: BinaryIO, path: Path) -> bytes:
    """The whole content of an open file, unpacked.

    Args:
        file: the open file; a gzip file must be open through `gzip`, which unpacks it.
        path: the file's path; its name ends in `.gz` if the file is gzip.
    """
    most = MAX_WHOLE_BYTES
    if path.name.endswith(".gz"):
        most = min(most, max(MAX_LINE_BYTES, MAX_EXPANSION * path.stat().st_size))
    told = (
        f"{path} has more than {most >> 20} MiB unpacked, too much to read whole; write it as "
        "several files, records as .jsonl, one a line"
    )
    if path.stat().st_size > most:  # nothing of it is read then
        raise InputError(told)
    pieces, total = [], 0
    while piece := file.read(_PIECE):
        total += len(piece)
        if total > most:
            raise InputError(told)
        pieces.append(piece)
    return b"".join(pieces)

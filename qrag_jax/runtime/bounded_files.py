"""Reads files of unknown origin: lines, whole files and arrays within limits, names and links.

A line without an end, or a few kilobytes of gzip that unpack to terabytes, raise a one-sentence
error.
"""

from __future__ import annotations

import os
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from qrag_jax.errors import InputError

MAX_LINE_BYTES = 64 * 2**20  # a document of 10M tokens has about 45 MB
MAX_WHOLE_BYTES = 4 * 2**30  # the largest official file has 0.7 GB
MAX_EXPANSION = 200  # of gzip; text unpacks to 3 to 10 times its size, a bomb to 1,000 times
MAX_NAME_BYTES = 255  # of a file's name, as on common file systems
_PIECE = 2**24


def lines(file: BinaryIO, path: Path, fix: str) -> Iterator[bytes]:
    """The lines of an open file, with their line ends; `fix` says what the user can do."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise InputError(
                f"{path}, line {number}, is longer than {MAX_LINE_BYTES >> 20} MiB; {fix}"
            )
        yield line


def to_append(path: Path, fix: str) -> BinaryIO | None:
    """A log that grows, open to be read and cut; None if there is none yet."""
    if not path.exists():
        return None
    try:
        return path.open("rb+")
    except OSError as error:
        raise InputError(f"{path} cannot be opened ({error.strerror}); {fix}.") from None


def whole(file: BinaryIO, path: Path) -> bytes:
    """The whole content of an open file; one whose path ends in `.gz` is open through `gzip`."""
    most = MAX_WHOLE_BYTES
    if path.name.endswith(".gz"):
        most = min(most, max(MAX_LINE_BYTES, MAX_EXPANSION * path.stat().st_size))
    too_large = (
        f"{path} has more than {most >> 20} MiB unpacked, too much to read whole; write it as "
        "several files, records as .jsonl, one a line"
    )
    if path.stat().st_size > most:  # nothing of it is read then
        raise InputError(too_large)
    content = bytearray()
    while piece := file.read(_PIECE):
        content += piece
        if len(content) > most:
            raise InputError(too_large)
    return bytes(content)


def mapped_array(path: Path) -> np.ndarray:
    """The array of a `.npy` file, mapped: nothing of it is read before it is looked at.

    NumPy reads the header as Python's text, and a broken one fails in many ways: here always with a
    ValueError, also where the file holds objects of Python.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (
        *(tokenize.TokenError, SyntaxError, TypeError, AttributeError, LookupError),
        *(EOFError, MemoryError, OverflowError, RecursionError),
    ) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__})") from None


def is_plain(name: object) -> bool:
    """Whether a name read from a file is a plain name in the same folder, on any system."""
    if not isinstance(name, str) or not name or name.startswith(".") or not name.isprintable():
        return False
    return not set(name) & set('/\\:"<>|?*') and len(name.encode()) <= MAX_NAME_BYTES


def check_links(folder: Path) -> None:
    """Refuses a folder with a link that leads out of it; the folder itself may be a link.

    Without this, a folder from someone else could make a program read any file of its user.
    """
    root = folder.resolve()
    for where, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(where, name)
            if not path.is_symlink():
                continue
            try:
                inside = path.resolve().is_relative_to(root)
            except (OSError, RuntimeError):  # links in a circle
                inside = False
            if not inside:
                raise InputError(
                    f"{path} is a link out of {folder}, which is not followed; put the file itself "
                    "there."
                )

"""Atomic writes: files appear whole or not at all, even if the process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qrag_jax.errors import InputError

PARTIAL = ".partial"  # suffix of files that are being written; their names begin with a dot

# Errors for a path that is not writable or is not a folder.
NOT_WRITABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Messages of libraries that report a full disk only in words: TensorStore and Orbax, safetensors,
# SQLite. NumPy's message says how much of an array was written.
_FULL_TEXTS = (
    "no space left on device",
    "enospc",
    "disk quota exceeded",
    "file too large",
    "database or disk is full",
)
_NUMPY_TEXT = (" requested and ", " written")


def default_cache() -> Path:
    """Of this user: `$QRAG_CACHE`, else `qrag_jax` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("QRAG_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qrag_jax"


def write_whole(path: Path, text: str | bytes) -> None:
    """Replaces a small file: there is either the old one or the new one, never a part of it."""
    with replacing(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file beside `path`; it replaces `path` when the block ends without an error."""
    if path.is_dir():  # told before the block runs, and with this name, not the partial file's
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names in the folder are on disk; does nothing if the file system cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_is_free(out: Path) -> None:
    """Refuses a folder that is not new or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out={out} exists and is not an empty folder; give another one.")


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to build in, which becomes `out` when the block ends without an error."""
    private = new_folder(out.parent, f".{out.name}-")
    building = private / out.name
    try:
        building.mkdir()
        yield building
        building.rename(out)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def new_folder(parent: Path, prefix: str) -> Path:
    """Makes a folder with a new name, in which something is built before it is renamed.

    Its permissions follow the user's umask, because runs and caches are shared. A folder of
    `tempfile.mkdtemp` would be open to the user alone.
    """
    folder = parent / f"{prefix}{secrets.token_hex(6)}"
    folder.mkdir(parents=True)
    return folder


def disk_is_full(error: BaseException) -> bool:
    """Whether the error, or one that led to it, means a full disk (or quota, or file size limit).

    Some libraries raise other classes, or OSErrors without a number, so messages count as well.
    """
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if any(words in text for words in _FULL_TEXTS):
            return True
        by_numpy = all(words in text for words in _NUMPY_TEXT)
        if isinstance(seen, OSError) and (seen.errno in _FULL or by_numpy):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def reason(error: BaseException) -> str:
    """The error's message on one line, without a path, such as "No space left on device"."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if disk_is_full(error):
        return os.strerror(errno.ENOSPC)
    return " ".join(str(error).split())[:200] or type(error).__name__

"""Files and folders that appear whole or not at all, whatever ends the process meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # how the names of files end that are being written; those begin with a dot

# What the system says of a folder that may not be written to, or is none.
NOT_WRITABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What libraries say that tell a full disk in words alone: TensorStore and Orbax, safetensors,
# SQLite; NumPy tells how much of an array was written.
_FULL_TEXTS = (
    "no space left on device",
    "enospc",
    "disk quota exceeded",
    "file too large",
    "database or disk is full",
)
_NUMPY_TEXT = (" requested and ", " written")


def write_whole(path: Path, text: str | bytes) -> None:
    """Writes a small file in the place of an older one, which stays as it is if this fails.

    After a kill, a crash of the machine or on a full disk there is the old file or the new one,
    never a part. Folders that miss are made.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` to write to; it takes the place of `path` as the block ends well.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
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
    """Waits until the names in the folder are on disk; not every file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def new_folder(parent: Path, prefix: str) -> Path:
    """Makes a folder of a name that was not there, to build something in and to rename it.

    Unlike `tempfile.mkdtemp`'s it is open to whom the user's umask says, not to the user alone:
    runs and caches are shared.

    Raises:
        OSError: it cannot be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(6)}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def disk_is_full(error: BaseException) -> bool:
    """Whether the error, or what it came from, is that of a full disk (quota, size of a file).

    Libraries raise classes of their own and OSErrors without a number, so words count too.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        text = str(seen).lower()
        if any(words in text for words in _FULL_TEXTS):
            return True
        if isinstance(seen, OSError) and all(words in text for words in _NUMPY_TEXT):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def reason(error: BaseException) -> str:
    """What the error says, on one line and without a path: "No space left on device"."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if disk_is_full(error):
        return os.strerror(errno.ENOSPC)
    return " ".join(str(error).split())[:200] or type(error).__name__

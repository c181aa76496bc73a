"""Locks for one process at a time in a run folder or at a log; the kernel releases them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import NOT_WRITABLE

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def run_lock(workdir: Path) -> Iterator[None]:
    """Keeps other trainings out of a run's folder; commands that score the run do not need it."""
    fix = f"wait until it ends, or end it, or give another --workdir than {workdir}"
    with held(workdir / ".lock", f"{workdir} is being trained", fix, "--workdir"):
        yield


@contextlib.contextmanager
def log_locks(*logs: Path) -> Iterator[None]:
    """Keeps other writers from logs that are appended to."""
    with contextlib.ExitStack() as stack:
        for log in logs:
            fix = "wait until it ends, or end it, or give another --out"
            path = log.with_name(f".{log.name}.lock")
            stack.enter_context(held(path, f"{log} is being written", fix, "--out"))
        yield


@contextlib.contextmanager
def held(path: Path, taken: str, fix: str, flag: str) -> Iterator[None]:
    """Holds the lock of the file `path`, which is made if absent and never deleted.

    If the process ends before the block, even by `kill -9`, the kernel releases the lock. The file
    says who holds it. On a file system without locks (some NFS) one line warns.

    Args:
        path: the lock file.
        taken: begins the error message if another process holds the lock.
        fix: says in that message what the user can do.
        flag: the command's flag that names another folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in NOT_WRITABLE:
            raise InputError(
                f"{path.parent} cannot be written ({error.strerror}); give another {flag}."
            ) from None
        raise
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{taken} by {_owner(file)}; {fix}.") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"note: the file system of {path.parent} has no locks ({error.strerror}); see to "
                "it that no second process writes there"
            )
        _sign(file)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
    finally:
        os.close(file)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of the file `path`, which must exist."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _sign(file: int) -> None:
    text = json.dumps({"host": socket.gethostname(), "process": os.getpid()}) + "\n"
    with contextlib.suppress(OSError):  # on a full disk the lock has no owner in it
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)


def _owner(file: int) -> str:
    try:
        said = json.loads(os.pread(file, 4096, 0))
        return f"process {int(said['process'])} on {str(said['host'])[:100]}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"

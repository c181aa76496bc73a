"""Deletes, at the start of a process, what killed processes left behind."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.runtime import locks, whole_files

BUILDING_ENCODER = ".encoder-"  # prefix of the folder in which a run's encoder is built
UNFINISHED_STEP = ".orbax-checkpoint-tmp"  # in the names of checkpoints being saved
WEIGHTS = "qrag-weights-"  # prefix of folders that hold weights for a server
WEIGHTS_LOCK = ".lock"  # lock file in such a folder, held by the folder's maker
MEMORY = Path("/dev/shm")  # noqa: S108  (a file system in memory; folders made there are private)

Log = Callable[[str], None]


def clean_run(workdir: Path, log: Log) -> None:
    """Deletes unfinished files in a run's folder; only the holder of its lock may call this."""
    clean_partial(workdir, log)
    _delete([*workdir.glob(f"{BUILDING_ENCODER}*")], log)
    _delete([*workdir.glob(f"checkpoints/*/*{UNFINISHED_STEP}*")], log)


def clean_partial(folder: Path, log: Log) -> None:
    """Deletes unfinished files directly in a folder; only the holder of its lock may call this."""
    _delete([*folder.glob(f".*{whole_files.PARTIAL}")], log)


def clean_weights(folder: Path, log: Log) -> None:
    """Deletes folders of weights in `folder` whose makers are dead, if permissions allow it."""
    _delete([path for path in folder.glob(f"{WEIGHTS}*") if _abandoned(path)], log)


@contextlib.contextmanager
def weights_folder(parent: Path | None, log: Log = print) -> Iterator[Path]:
    """A private folder for a server's weights or socket, deleted when the block ends.

    If the process is killed, the next such block deletes the folder.

    Args:
        parent: where the folder is made (`parent` too, if absent); None: the usual temporary
            folder.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    clean_weights(parent, log)
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=WEIGHTS, dir=parent))
            with contextlib.suppress(InputError, FileNotFoundError):
                stack.enter_context(locks.held(folder / WEIGHTS_LOCK, "taken", "", "folder"))
                if (folder / WEIGHTS_LOCK).exists():
                    break
            # Another process inspected the folder before it was locked, and may have deleted it.
            shutil.rmtree(folder, ignore_errors=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def _abandoned(path: Path) -> bool:
    # Process ids would not tell: containers that share the memory each count from 1.
    lock = path / WEIGHTS_LOCK
    try:
        return lock.is_file() and not path.is_symlink() and not locks.is_held(lock)
    except OSError:  # another user's, or just deleted
        return False


def _delete(paths: list[Path], log: Log) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if not path.exists():
            log(f"deleted {path}, which a process that was killed had left")

"""Files: written whole, read within limits, locked, cleaned of what killed processes left.

A file appears whole or not at all, even if the process is killed. A line without an end, or a few
kilobytes of gzip that unpack to terabytes, raise a one-sentence error.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qrag_jax.errors import InputError

PARTIAL = ".partial"  # suffix of files that are being written; their names begin with a dot
MAX_LINE_BYTES = 64 * 2**20  # a document of 10M tokens has about 45 MB
MAX_WHOLE_BYTES = 4 * 2**30  # the largest official file has 0.7 GB
_MAX_EXPANSION = 200  # of gzip; text unpacks to 3 to 10 times its size, a bomb to 1,000 times
_MAX_NAME_BYTES = 255  # of a file's name, as on common file systems
_PIECE = 2**24
BUILDING_ENCODER = ".encoder-"  # prefix of the folder in which a run's encoder is built
UNFINISHED_STEP = ".orbax-checkpoint-tmp"  # in the names of checkpoints being saved
WEIGHTS = "qrag-weights-"  # prefix of folders that hold weights for a server
MEMORY = Path("/dev/shm")  # noqa: S108  (a file system in memory; folders made there are private)
LOCK = ".lock"  # in a folder that one process writes at a time
DIGESTS = "digests.json"  # of the files of a saved step
# Orbax writes these files into a step's folder when it moves the step to its place, that is after
# the digests.
STEP_METADATA = "_CHECKPOINT_METADATA"
_LATER = (STEP_METADATA, "commit_success.txt", DIGESTS)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Errors for a path that is not writable or is not a folder.
_NOT_WRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
    *(errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG),
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What libraries say that report a full disk only in words: TensorStore and Orbax, safetensors,
# SQLite, NumPy (how much of an array was written).
_FULL_TEXT = re.compile(
    "no space left on device|enospc|disk quota exceeded|file too large|database or disk is full|"
    " requested and .* written",
    re.IGNORECASE,
)

Log = Callable[[str], None]


def default_cache() -> Path:
    """Of this user: `$QRAG_CACHE`, else `qrag_jax` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if folder := os.environ.get("QRAG_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qrag_jax"


def write_whole(path: Path, text: str | bytes) -> None:
    """Replaces a small file: there is either the old one or the new one, never a part of it."""
    with replacing(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


def write_json(path: Path, value: Any) -> None:
    """As `write_whole`."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file next to `path`; it replaces `path` when the block ends without an error."""
    if path.is_dir():  # refused before the block runs, and with this name, not the partial file's
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
    with contextlib.suppress(OSError):  # the name, too, where the file system can wait for it
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
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
    """A folder to build in, which becomes `out` when the block ends without an error.

    Its permissions follow the user's umask, because runs and caches are shared. A folder of
    `tempfile.mkdtemp` would be open to the user alone.
    """
    private = out.parent / f".{out.name}-{secrets.token_hex(6)}"
    building = private / out.name
    try:
        building.mkdir(parents=True)
        yield building
        building.rename(out)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def disk_is_full(error: BaseException) -> bool:
    """Whether the error, or one that led to it, means a full disk (or quota, or file size limit).

    Some libraries raise other classes, or OSErrors without a number, so messages count as well.
    """
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "errno", None) in _FULL or _FULL_TEXT.search(str(seen)):
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


@contextlib.contextmanager
def reading(
    what: object, fix: str, errors: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
    """Turns errors of a block that reads a file into one sentence; `fix` says what to do."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        raise InputError(f"{what} cannot be read ({reason(error)}); {fix}.") from None


@contextlib.contextmanager
def writing(place: Path | str, flag: str) -> Iterator[None]:
    """Turns write errors of the block into one sentence; `flag` is what names another place."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # libraries raise many classes for a full disk
        full = disk_is_full(error)
        if not full and getattr(error, "errno", None) not in _NOT_WRITABLE:
            raise
        where = getattr(error, "filename", None) or place
        fix = f"{'free space there, or ' if full else ''}give another {flag}"
        raise InputError(f"{where} cannot be written ({reason(error)}); {fix}.") from None


# ---------------------------------------------------------------------- foreign files


def bounded_lines(file: BinaryIO, path: Path, fix: str) -> Iterator[bytes]:
    """The lines of an open file, with their line ends; `fix` says what the user can do."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{path}, line {number}: more than {MAX_LINE_BYTES >> 20} MiB; {fix}")
        yield line


def bounded_content(file: BinaryIO, path: Path) -> bytes:
    """The whole content of an open file; one whose path ends in `.gz` is open through `gzip`."""
    size, most = path.stat().st_size, MAX_WHOLE_BYTES
    if path.name.endswith(".gz"):
        most = min(most, max(MAX_LINE_BYTES, _MAX_EXPANSION * size))
    content = bytearray()
    while size <= most and (piece := file.read(_PIECE)):
        content += piece
        size = max(size, len(content))
    if size > most:
        raise InputError(f"{path} has more than {most >> 20} MiB; write several files, or .jsonl")
    return bytes(content)


def is_plain(name: object) -> bool:
    """Whether a name read from a file is a plain name in the same folder, on any system."""
    if not isinstance(name, str) or not name or name.startswith(".") or not name.isprintable():
        return False
    return not set(name) & set('/\\:"<>|?*') and len(name.encode()) <= _MAX_NAME_BYTES


def inside(folder: Path, *names: str) -> Path:
    """The path of a file in a folder of somebody else's, if no link leads out of it.

    Without this, such a folder could make a program read any file of its user. The exception is the
    hub's cache: its links into the `blobs` of the same model are followed. The file need not exist.
    """
    path = folder.joinpath(*names)
    try:
        root, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise InputError(f"{path}: a link to nowhere ({error}); put a file there.") from None
    snapshots = next((above for above in root.parents if above.name == "snapshots"), root)
    model = snapshots.parent
    of_hub = snapshots != root and model.name.startswith("models--")
    if real.is_relative_to(root) or (of_hub and real.parent == model / "blobs"):
        return path
    raise InputError(f"{path}: a link out of {folder} (to {real}); put the file itself there.")


def check_links(folder: Path) -> None:
    """Refuses a folder with a link that leads out of it (see `inside`)."""
    for path in filter(Path.is_symlink, folder.rglob("*")):
        inside(folder, str(path.relative_to(folder)))


# ---------------------------------------------------------------------- locks


def run_lock(workdir: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps other trainings out of a run's folder; commands that score the run do not need it."""
    return file_lock(workdir / LOCK, workdir, "--workdir", verb="trained")


@contextlib.contextmanager
def log_locks(*logs: Path) -> Iterator[None]:
    """Keeps other writers from logs that are appended to."""
    with contextlib.ExitStack() as stack:
        for log in logs:
            stack.enter_context(file_lock(log.with_name(f".{log.name}.lock"), log, "--out"))
        yield


@contextlib.contextmanager
def file_lock(path: Path, place: Path, flag: str, verb: str = "written") -> Iterator[None]:
    """Holds the lock of the file `path`, which is made if absent; it protects `place`.

    If the process ends before the block, even by `kill -9`, the kernel releases the lock. The file
    says who holds it. On a file system without locks (some NFS) one line warns.
    """
    with writing(path.parent, flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab+", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists():  # its holder was refused, and has just deleted it
                raise BlockingIOError
        except BlockingIOError:
            file.seek(0)
            owner = file.read(4096).decode(errors="replace").strip() or "another process"
            raise InputError(
                f"{place} is being {verb} by {owner}; end that first, or give another {flag}."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"note: {path.parent} has no locks ({error.strerror}); let nobody else write")
        with contextlib.suppress(OSError):  # on a full disk the lock has no owner in it
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)


# ---------------------------------------------------------------------- what killed processes left


def clean_unfinished(folder: Path) -> None:
    """Deletes what is half made in a folder, for example a run's; for the holder of its lock."""
    for half_made in (f".*{PARTIAL}", f"{BUILDING_ENCODER}*", f"checkpoints/*/*{UNFINISHED_STEP}*"):
        _delete(folder.glob(half_made))


def clean_weights(folder: Path) -> None:
    """Deletes folders of weights in `folder` whose makers are dead, if permissions allow it."""
    _delete(filter(_is_abandoned, folder.glob(f"{WEIGHTS}*")))


@contextlib.contextmanager
def weights_folder(parent: Path | None = None) -> Iterator[Path]:
    """A private folder in `parent` for a server's weights or socket, deleted as the block ends.

    If the process is killed, the next such block deletes the folder.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    clean_weights(parent)
    deleted = tempfile.TemporaryDirectory(prefix=WEIGHTS, dir=parent, ignore_cleanup_errors=True)
    with deleted as name, file_lock(Path(name) / LOCK, Path(name), "folder"):
        yield Path(name)


def _is_abandoned(folder: Path) -> bool:
    # Process ids would not tell: containers that share the memory each count from 1.
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held, or is another user's, or just deleted
        return False
    return not folder.is_symlink()


def _delete(paths: Iterable[Path]) -> None:
    for path in [*paths]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if not path.exists():
            # Not to the standard output, which may be a list of addresses (`qrag serve_llm`).
            print(f"deleted {path}, which a process that was killed had left", file=sys.stderr)


# ---------------------------------------------------------------------- digests


def half(name: str) -> int:
    """0 or 1, by a name's digest: the same in every run, and in whatever order names come."""
    return hashlib.sha256(name.encode()).digest()[0] & 1


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex; raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_digest(folder: Path, log: Log) -> str:
    """A digest of the files in a model's folder, but its card; "" if there is no such folder.

    It tells weights apart in folders of the same name. It reads all files, about a second per
    gigabyte and core, which the system then has in memory for the server.
    """
    paths = sorted([*folder.glob("[!.]*"), *folder.glob("*/*.jinja")])  # templates may lie deeper
    files = [path for path in paths if path.suffix.lower() != ".md" and path.is_file()]
    if (size := sum(path.stat().st_size for path in files)) >= 2**30:
        log(f"reading {folder} ({size / 1e9:.1f} GB), to know its weights from others.")
    digest = hashlib.sha256()
    with reading(folder, "see that you may read all files in it"):
        for path, its in zip(files, _sha256_of_each(files), strict=True):
            digest.update(f"{path.relative_to(folder)} {its}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16] if folder.is_dir() else ""


def _sha256_of_each(files: Iterable[Path]) -> list[str]:
    """A core hashes 0.9 GB/s; hashlib releases the interpreter's lock while it works."""
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return [*pool.map(sha256, files)]


def write_digests(folder: Path) -> None:
    """Writes a file with the size and SHA-256 of every other one into a saved step's folder.

    Orbax 0.12.8 writes arrays without checksums of their bytes: of 60 flipped bits in the arrays of
    a small state, it restored 57 as other numbers without an error.
    """
    digests = _digests(folder)
    if not digests:  # somebody has deleted them
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    write_json(folder / DIGESTS, digests)


def damage(folder: Path) -> str:
    """Says what is wrong with the files of a step; "" if nothing is."""
    name = STEP_METADATA
    try:
        json.loads((folder / name).read_bytes())
        name = DIGESTS
        saved = json.loads((folder / name).read_bytes())
        name = "of the step"
        digests = _digests(folder)
    except (OSError, ValueError) as error:
        return f"file {name} cannot be read: {reason(error)}"
    wrong = next((name for name in saved if digests.get(name) != saved[name]), None)
    how = "not as it was saved" if wrong in digests else "missing"
    return f"file {wrong} is {how}" if wrong else ""


def _digests(folder: Path) -> dict[str, list[int | str]]:
    """Size and SHA-256 of each file, by its path below the folder."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    chosen = {n: path for n, path in files.items() if n not in _LATER and path.is_file()}
    digests = _sha256_of_each(chosen.values())
    return {n: [chosen[n].stat().st_size, d] for n, d in zip(chosen, digests, strict=True)}

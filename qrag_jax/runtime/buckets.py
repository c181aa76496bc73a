"""A run's folder in an object store: `--workdir=gs://bucket/run`, or s3://, az://, any of fsspec.

A run needs a disk: its logs grow by appended lines, and locks and renames are the file system's.
So a command works in a folder of the user's cache, which is made equal to the bucket's before it
starts. What changes is sent while it runs and when it ends. A checkpoint's last file is sent last,
and a step without it is not fetched, so that a kill in the middle of sending leaves a run that
resumes. `RECORD` says what both sides had when they were equal: if the bucket has not changed
since, the folder is ahead of it and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime.own_code import flag_values
from qrag_jax.runtime.whole_files import (
    PARTIAL,
    STEP_METADATA,
    UNFINISHED_STEP,
    default_cache,
    inside,
    reading,
    reason,
    write_json,
)

RECORD, LEASE, IN_USE = ".bucket.json", ".lease.json", ".in-use"
INTERVAL = 30.0  # seconds between two rounds of sending
_TRIES = 3  # of the last round
_LOCAL = (RECORD, LEASE, IN_USE)  # names of files that stay where they are

# Of each file that both sides have, its size and time here and its version there.
Record = dict[str, list[Any]]
_open: dict[Path, Bucket] = {}  # of this process, by their folders


@contextlib.contextmanager
def staged(argv: Sequence[str]) -> Iterator[list[str]]:
    """The command line with a folder of this machine in place of the bucket of `--workdir`."""
    words = list(argv)
    urls = [found for found in flag_values(argv, "workdir") if "://" in found[1]]
    if not urls:
        yield words
        return
    place, url = urls[0]
    if hosts := [word for word in words if word.lstrip("-").startswith("hosts")]:
        raise InputError(f"--workdir={url}: with {hosts[0]} give a folder that all hosts share.")
    with opened(url) as folder:
        words[place] = words[place].replace(url, str(folder))
        yield words


@contextlib.contextmanager
def opened(url: str) -> Iterator[Path]:
    """A folder with what `url` holds; changes are sent there, at the latest at the end."""
    bucket = Bucket(url)
    bucket.folder.mkdir(parents=True, exist_ok=True)
    with (bucket.folder / IN_USE).open("ab") as in_use:
        bucket.fetch(in_use.fileno())
        print(f"{url}: works in {bucket.folder}", file=sys.stderr, flush=True)
        ended, _open[bucket.folder] = threading.Event(), bucket
        with ThreadPoolExecutor(1, "bucket") as pool:
            sending = pool.submit(bucket.keep_sending, ended)
            try:
                yield bucket.folder
            finally:
                del _open[bucket.folder]
                ended.set()
                sending.result()


def shown(folder: Path) -> str:
    """What a user gives as `--workdir` for this folder."""
    return _open[folder].url if folder in _open else str(folder)


def held(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps trainings on other machines out of the bucket behind `folder`, if there is one."""
    return _open[folder].lease() if folder in _open else contextlib.nullcontext()


class Bucket:
    """One folder of an object store, and the folder of this machine that stands for it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.dirfs import DirFileSystem

            store, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise InputError(
                f"--workdir={url}: {reason(error)}; install its package (gcsfs, s3fs, adlfs …)."
            ) from None
        self._store: Any = DirFileSystem(root.rstrip("/"), store)
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        self.folder = default_cache() / "buckets" / digest / (PurePosixPath(root).name or "run")
        self._leased: dict[str, Any] | None = None

    # ------------------------------------------------------------ here ← there

    def fetch(self, in_use: int) -> None:
        """Makes the folder equal to the bucket, unless only the folder has changed since they were.

        A folder that another command works in is taken as it is. `in_use` is the file whose lock
        says so; this process holds it, shared, from here on.
        """
        try:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(in_use, fcntl.LOCK_SH)
            return
        with self._reaching():
            there, record = self._listed(), self._record()
            if there != {name: token for name, (_, token) in record.items()}:
                self._mirror(there, record)
        fcntl.flock(in_use, fcntl.LOCK_SH)

    def _mirror(self, there: dict[str, str], record: Record) -> None:
        here = self._files()
        for name, token in there.items():
            if name in here and record.get(name) == [here[name], token]:
                continue
            path = inside(self.folder, name)  # a name may hold ..
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}{PARTIAL}")
            self._store.get_file(name, str(partial))
            os.replace(partial, path)
        for name in here.keys() - there.keys():
            (self.folder / name).unlink()
        for step in self.folder.glob("checkpoints/*/[0-9]*"):
            if not (step / STEP_METADATA).exists():  # it was not sent whole
                shutil.rmtree(step)
        self._write_record(self._files(), there)

    # ------------------------------------------------------------ here → there

    def keep_sending(self, ended: threading.Event) -> None:
        """Sends what changes until `ended` is set, and then what is left.

        A store that is out of reach is tried again. Files that cannot be sent stay here, for the
        next command.
        """
        failed, last = "", 0  # rounds since the end
        while last < _TRIES:
            last += ended.wait(INTERVAL)
            try:
                self.send()
            except Exception as error:  # stores raise errors of their own
                if not last and reason(error) != failed:
                    again = f"({reason(error)}); trying again"
                    print(f"{self.url} is out of reach {again}", file=sys.stderr)
                failed = reason(error)
                time.sleep(1)
            else:
                if last:
                    return
                failed = ""
        raise InputError(f"{self.url} cannot be written ({failed}); retry, {self.folder} has it.")

    def send(self) -> None:
        """Sends what has changed here since the last round, and deletes what is gone."""
        with (self.folder / RECORD).with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # commands in one folder send in turn
            record, here = self._record(), self._files()
            if (lease := self._leased) is not None:
                self._renew(lease)
            changed = [name for name, size in here.items() if record.get(name, [[]])[0] != size]
            gone = record.keys() - here.keys()
            if not changed and not gone:
                return
            # What grows is sent before the checkpoints, and each step's metadata after its files.
            for name in sorted(changed, key=lambda name: (_rank(name), name)):
                if (self.folder / name).exists():  # else it was deleted meanwhile
                    self._store.makedirs(name.rpartition("/")[0], exist_ok=True)
                    self._store.put_file(str(self.folder / name), name)
            for name in sorted(gone, key=_rank, reverse=True):
                with contextlib.suppress(FileNotFoundError):
                    self._store.rm_file(name)
            self._write_record(here, self._listed())

    # ------------------------------------------------------------ lease

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Waits until no other machine renews its lease, and renews an own one in each round.

        It refuses if another one does. That is watched, since clocks may differ.
        """
        mine = {"host": socket.gethostname(), "folder": str(self.folder), "round": 0}
        with self._reaching():
            seen = self._lease()
            if seen and (seen.get("host"), seen.get("folder")) != (mine["host"], mine["folder"]):
                print(f"{self.url} was last held by {seen.get('host')}; waiting whether it goes on")
                end = time.monotonic() + 3 * INTERVAL
                while time.monotonic() < end and (now := self._lease()):
                    if now != seen:
                        raise InputError(f"{self.url} is held by {now.get('host')}; end that.")
                    time.sleep(min(1.0, INTERVAL))
            self._leased = mine
            self._renew(mine)
        try:
            yield
        finally:  # lets others in at once; a lease that cannot be deleted runs out
            self._leased = None
            with contextlib.suppress(Exception):
                self._store.rm_file(LEASE)

    def _renew(self, lease: dict[str, Any]) -> None:
        lease["round"] += 1
        self._store.makedirs("", exist_ok=True)
        self._store.pipe_file(LEASE, json.dumps(lease).encode())

    def _lease(self) -> dict[str, Any]:
        for _ in range(9):
            self._store.invalidate_cache()
            try:
                return json.loads(self._store.cat_file(LEASE))
            except FileNotFoundError:
                break
            except ValueError:  # a store of files shows it half written
                time.sleep(0.1)
        return {}

    def _reaching(self) -> contextlib.AbstractContextManager[None]:
        fix = "see its name, the credentials in the environment, and the network"
        return reading(f"--workdir={self.url}", fix, (Exception,))

    # ------------------------------------------------------------ lists of files

    def _files(self) -> dict[str, list[int]]:
        """Size and time of each whole file here, by its name below the folder."""
        files = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            unfinished = UNFINISHED_STEP in name or name.endswith((PARTIAL, ".lock"))
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.name not in _LOCAL and not unfinished:
                    status = path.stat()
                    files[name] = [status.st_size, status.st_mtime_ns]
        return files

    def _listed(self) -> dict[str, str]:
        """What tells the version of each file there from others, by its name."""
        self._store.invalidate_cache()
        try:
            files = self._store.find("", detail=True)
        except FileNotFoundError:
            return {}
        versions = {name: str(sorted(about.items(), key=str)) for name, about in files.items()}
        return {
            name: hashlib.sha256(version.encode()).hexdigest()[:16]
            for name, version in versions.items()
            if PurePosixPath(name).name not in _LOCAL
        }

    def _record(self) -> Record:
        path = self.folder / RECORD
        return json.loads(path.read_text()) if path.exists() else {}

    def _write_record(self, here: dict[str, list[int]], there: dict[str, str]) -> None:
        both = {name: [here[name], there[name]] for name in here if name in there}
        write_json(self.folder / RECORD, both)


def _rank(name: str) -> int:
    if not name.startswith("checkpoints/"):
        return 0
    return 2 if name.endswith(STEP_METADATA) else 1

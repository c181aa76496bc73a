"""Caches answers in one SQLite file, which processes may share and a crash does not damage."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import ENDS, Answer, Usage

_APPLICATION_ID = 0x51524147  # "QRAG", in the file's header
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# Errors that may pass: another process holds the file, the disk is full.
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)
_KEYS_PER_QUERY = 500  # SQLite's oldest limit is 999
_BUSY_SECONDS = 3.0  # other processes usually release the file within this time
_LOOK_AGAIN = 0.02  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 120.0  # seconds before the file is tried again
_MOST_PENDING = 20_000  # answers kept in memory meanwhile

_USED = ("written to", "read")

T = TypeVar("T")


class _Rest:
    """A pause in which something is not tried again; each pause is longer, up to a limit."""

    def __init__(self) -> None:
        self.pause, self._ends = 0.0, 0.0

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self._ends

    def begin(self) -> None:
        self.pause = min(2 * self.pause or _FIRST_PAUSE, _LONGEST_PAUSE)
        self._ends = time.monotonic() + self.pause

    def end(self) -> None:
        self.pause = self._ends = 0.0


class AnswerCache:
    """Answers by `outcomes.request_key`; the file holds no prompts and no API key.

    Answers are written in batches; `flush` writes one. If another process holds the file for long,
    the cache does not use it for a while: answers are not looked up, which is counted, and new ones
    wait in memory. If the file is broken, it is renamed to FILE.broken and a new one is made. If it
    cannot be used any more, the cache stops working. All this is logged.

    Threads may share the cache. `put` and `pending` never wait. The other methods may wait for the
    disk and for other processes, so they must not run on an event loop.

    Attributes:
        skipped: number of answers not looked up, because another process held the file.

    Raises:
        InputError: the file cannot be made, or is a database of something else.
    """

    def __init__(self, path: Path, log: Callable[[str], None], field: str = "cache") -> None:
        """
        Args:
            path: the file.
            log: receives lines for people.
            field: name of the setting that gives the file, for messages.
        """
        self.path, self._log, self._field = path, log, field
        self.skipped = 0
        self._pending: dict[bytes, str] = {}
        self._lost = 0  # answers dropped because too many were pending
        self._pending_lock, self._file_lock = threading.Lock(), threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._over = False  # closed, or given up
        self._reading, self._writing = _Rest(), _Rest()  # another process may block only one
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._open()
        except (OSError, sqlite3.Error) as error:
            if not _passes(error):
                raise InputError(
                    f"{self._field}={path} cannot be opened ({error}); give another file."
                ) from None
            self._leave_alone(self._reading, error)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        """The answers that the cache has, by key and marked as cached."""
        self.flush()
        found: dict[bytes, Answer] = {}
        with self._pending_lock:
            texts = {key: self._pending[key] for key in keys if key in self._pending}
        left = [key for key in keys if key not in texts]
        for start in range(0, len(left), _KEYS_PER_QUERY):
            part = left[start : start + _KEYS_PER_QUERY]
            rows = self._run(functools.partial(_select, part), self._reading)
            if rows is None and not self._over:
                self.skipped += len(part)
            texts.update(rows or ())
        for key, text in texts.items():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found[key] = _decode(text)
        return found

    def put(self, key: bytes, answer: Answer) -> None:
        """Adds an answer; the next `flush` writes it."""
        if self._over:
            return
        text = json.dumps(dataclasses.asdict(answer))
        with self._pending_lock:
            if len(self._pending) < _MOST_PENDING or key in self._pending:
                self._pending[key] = text
            else:
                self._lost += 1

    @property
    def pending(self) -> int:
        """The number of answers not yet written."""
        return len(self._pending)

    def flush(self) -> None:
        """Writes the pending answers in one transaction; keeps them if the file is not free now."""
        with self._pending_lock:
            rows = dict(self._pending)
        if not rows:
            return

        def write(connection: sqlite3.Connection) -> bool:
            with connection:
                connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows.items())
            return True

        if self._run(write, self._writing) or self._over:
            with self._pending_lock:
                for key, text in rows.items():
                    if self._pending.get(key) is text:
                        del self._pending[key]

    def close(self) -> None:
        """Writes the pending answers and closes the file; may be called again."""
        with self._file_lock:
            if self._over:
                return
            self._writing.end()  # this is the last chance to write
            self.flush()
            self._over = True
            if lost := len(self._pending) + self._lost:
                self._log(f"{self.path}: {lost} answers could not be kept")
            self._disconnect()

    def _run(self, work: Callable[[sqlite3.Connection], T], rest: _Rest) -> T | None:
        """Runs `work`, on a new file if this one is broken; None if it is not possible now."""
        with self._file_lock:
            for _ in range(2):
                if self._over or rest.lasts:
                    return None
                try:
                    if self._connection is None:
                        self._connection = self._open()
                    with _told_in_bytes():
                        done = work(self._connection)
                except (OSError, sqlite3.Error, InputError) as error:
                    if _passes(error):
                        self._leave_alone(rest, error)
                        return None
                    self._disconnect()
                    if not _is_broken(error):
                        self._give_up(error)
                        return None
                    continue  # opening it again puts the broken file aside
                if rest.pause:
                    rest.end()
                    use = _USED[rest is self._reading]
                    self._log(f"{self.path}: the cache of answers is {use} again")
                return done
            self._give_up(OSError("broken again and again"))
            return None

    def _leave_alone(self, rest: _Rest, error: Exception) -> None:
        if not rest.pause:
            use = _USED[rest is self._reading]
            self._log(f"{self.path}: {error}; the cache of answers is not {use} for a while")
        rest.begin()

    def _give_up(self, error: Exception) -> None:
        self._over = True
        self._log(f"{self.path}: {error}; going on without the cache of answers")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.Error as error:
            if not _is_broken(error):
                raise
        with self._alone():
            try:
                return self._connect()  # another process may have put it aside by now
            except sqlite3.Error as error:
                if not _is_broken(error):
                    raise
            aside = self.path.with_name(f"{self.path.name}.broken")
            os.replace(self.path, aside)
            for ending in ("-wal", "-shm"):
                self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
            self._log(f"{self.path} is broken; it is now {aside.name}, and a new cache begins")
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        """Opens the file, and tries again for `_BUSY_SECONDS`.

        While another process makes the same file, SQLite refuses some steps without waiting.
        """
        ends = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                with _told_in_bytes():
                    return self._connect_once()
            except sqlite3.Error as error:
                if not _passes(error) or time.monotonic() > ends:
                    raise
            time.sleep(_LOOK_AGAIN)

    def _connect_once(self) -> sqlite3.Connection:
        # One thread makes it and another uses it; `_file_lock` lets only one in at a time.
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, check_same_thread=False)
        try:
            # The order matters: a process that makes the file sets the id before it makes a table.
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (owner,) = connection.execute("PRAGMA application_id").fetchone()
            if tables and owner != _APPLICATION_ID:
                raise InputError(
                    f"{self._field}={self.path} is a database of something else; give another file."
                )
            if not tables:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT)"
                )
            connection.execute("PRAGMA synchronous = NORMAL")  # enough to survive a crash
            connection.execute("SELECT key, answer FROM answers LIMIT 1").fetchone()
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds a lock: while one process replaces a broken file, the others wait."""
        with self.path.with_name(f"{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _select(keys: Sequence[bytes], connection: sqlite3.Connection) -> list[tuple[bytes, str]]:
    marks = ",".join("?" * len(keys))
    query = f"SELECT key, answer FROM answers WHERE key IN ({marks})"  # noqa: S608
    return connection.execute(query, keys).fetchall()


@contextlib.contextmanager
def _told_in_bytes() -> Iterator[None]:
    """SQLite names what is damaged by bytes of the file, which may be no text."""
    try:
        yield
    except UnicodeDecodeError as error:
        broken = sqlite3.DatabaseError("database disk image is malformed")
        broken.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise broken from error


def _is_broken(error: Exception) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _BROKEN


def _passes(error: Exception) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _PASSING


def _decode(text: str) -> Answer:
    fields = json.loads(text)
    fields["usage"] = Usage(**fields["usage"])
    for name in ("tokens", "token_ids", "log_probs"):
        fields[name] = tuple(fields[name])
    if fields["finish_reason"] not in ENDS:  # written by an earlier version
        raise ValueError("no answer")
    return Answer(**fields | {"cached": True})

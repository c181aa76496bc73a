"""Caches answers in one SQLite file, which processes may share and a crash does not damage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import ENDS, Answer, Usage

_APPLICATION_ID = 0x51524147  # "QRAG", in the file's header
# Errors that may pass: another process holds the file, the disk is full.
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)
# SQLite names what is damaged by bytes of the file, which may be no text.
_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)
_KEYS_PER_QUERY = 500  # SQLite's oldest limit is 999
_BUSY_SECONDS = 3.0  # other processes usually release the file within this time
_LOOK_AGAIN = 0.02  # seconds

T = TypeVar("T")


class AnswerCache:
    """Answers by `outcomes.request_key`; the file holds no prompts and no API key.

    Answers are written in batches; `flush` writes one. If another process holds the file for long,
    answers are not looked up, which is counted, and new ones wait in memory. If the file cannot be
    used any more, the cache stops working, which is logged.

    Threads may share the cache. `put` and `pending` never wait. The other methods may wait for the
    disk and for other processes, so they must not run on an event loop.

    Attributes:
        skipped: number of answers not looked up, because another process held the file.
    """

    def __init__(self, path: Path, log: Callable[[str], None], field: str = "cache") -> None:
        """
        Args:
            path: the file.
            log: receives lines for people.
            field: name of the setting that gives the file, for messages.
        """
        self.path, self.skipped = path, 0
        self._log, self._field = log, field
        self._pending: dict[bytes, str] = {}
        self._pending_lock, self._file_lock = threading.Lock(), threading.RLock()
        self._over = False  # closed, or given up
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._open()
        except _ERRORS as error:
            raise InputError(
                f"{field}={path} cannot be opened ({error}); delete it, or give another file."
            ) from None

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        """The answers that the cache has, by key and marked as cached."""
        self.flush()
        found: dict[bytes, Answer] = {}
        with self._pending_lock:
            texts = {key: self._pending[key] for key in keys if key in self._pending}
        left = [key for key in keys if key not in texts]
        for start in range(0, len(left), _KEYS_PER_QUERY):
            part = left[start : start + _KEYS_PER_QUERY]
            rows = self._run(functools.partial(_select, part))
            if rows is None and not self._over:
                self.skipped += len(part)
            texts.update(rows or ())
        for key, text in texts.items():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found[key] = _decode(text)
        return found

    def put(self, key: bytes, answer: Answer) -> None:
        """Adds an answer; the next `flush` writes it."""
        if not self._over:
            text = json.dumps(dataclasses.asdict(answer))
            with self._pending_lock:
                self._pending[key] = text

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

        if self._run(write) or self._over:
            with self._pending_lock:
                for key, text in rows.items():
                    if self._pending.get(key) is text:
                        del self._pending[key]

    def close(self) -> None:
        """Writes the pending answers and closes the file; may be called again."""
        with self._file_lock:
            if self._over:
                return
            self.flush()
            self._over = True
            if self._pending:
                self._log(f"{self.path}: {len(self._pending)} answers could not be kept")
            self._connection.close()

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """The result of `work`; None if it is not possible, now or ever."""
        with self._file_lock:
            if self._over:
                return None
            try:
                return work(self._connection)
            except _ERRORS as error:
                if not _passes(error):
                    self._over = True
                    self._connection.close()
                    self._log(f"{self.path}: {error}; going on without the cache of answers")
                return None

    def _open(self) -> sqlite3.Connection:
        """Opens the file, and tries again for `_BUSY_SECONDS`.

        While another process makes the same file, SQLite refuses some steps without waiting.
        """
        ends = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                return self._open_once()
            except sqlite3.Error as error:
                if not _passes(error) or time.monotonic() > ends:
                    raise
            time.sleep(_LOOK_AGAIN)

    def _open_once(self) -> sqlite3.Connection:
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


def _select(keys: Sequence[bytes], connection: sqlite3.Connection) -> list[tuple[bytes, str]]:
    marks = ",".join("?" * len(keys))
    query = f"SELECT key, answer FROM answers WHERE key IN ({marks})"  # noqa: S608
    return connection.execute(query, keys).fetchall()


def _passes(error: Exception) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _PASSING


def _decode(text: str) -> Answer:
    fields = json.loads(text)
    fields["usage"] = Usage(**fields["usage"])
    for name in ("tokens", "token_ids", "log_probs"):
        fields[name] = tuple(fields[name])
    if fields["finish_reason"] not in ENDS:
        raise ValueError("no answer")
    return Answer(**fields | {"cached": True})

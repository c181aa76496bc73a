"""Answers kept on disk: one SQLite file that many processes share and a crash leaves whole."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import ENDS, Answer, Usage

_APPLICATION_ID = 0x51524147  # "QRAG", in the file's header
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_KEYS_PER_QUERY = 500  # SQLite's oldest limit is 999
_BUSY_SECONDS = 10.0

T = TypeVar("T")


class AnswerCache:
    """Answers by `outcomes.request_key`; holds no prompts and no keys of the server.

    Answers are written in batches, `flush` ends one. A file that is broken is put aside under
    the name FILE.broken and a new one is made, which `say` is told; so it is where the file can
    no longer be written, after which the cache does nothing more. Not thread-safe.

    Raises:
        InputError: the file cannot be made, or belongs to something else.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._pending: dict[bytes, str] = {}
        self._connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._open()
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"config.llm.cache={path} cannot be opened ({error}); give another file."
            ) from None

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        """Those of the answers that are known, marked as cached."""
        self.flush()
        found: dict[bytes, Answer] = {}
        for start in range(0, len(keys), _KEYS_PER_QUERY):
            part = keys[start : start + _KEYS_PER_QUERY]
            rows = self._run(functools.partial(_select, part))
            for key, text in rows or ():
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    found[key] = _decode(text)
        return found

    def put(self, key: bytes, answer: Answer) -> None:
        """Keeps an answer from the next `flush` on."""
        if self._connection is not None:
            self._pending[key] = json.dumps(dataclasses.asdict(answer))

    @property
    def pending(self) -> int:
        """Answers not yet written."""
        return len(self._pending)

    def flush(self) -> None:
        """Writes what is pending in one transaction."""
        if not self._pending:
            return
        rows, self._pending = list(self._pending.items()), {}

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

        self._run(write)

    def close(self) -> None:
        """Writes what is pending and closes the file; may be called again."""
        self.flush()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Does `work`, on a new file if this one turns out to be broken; None if it cannot."""
        for _ in range(2):
            if self._connection is None:
                return None
            try:
                return work(self._connection)
            except (OSError, sqlite3.Error) as error:
                self._connection.close()
                self._connection = None
                if not _is_broken(error):
                    self._give_up(error)
                    return None
            try:
                self._connection = self._open()
            except (OSError, sqlite3.Error, InputError) as error:
                self._give_up(error)
        return None

    def _give_up(self, error: Exception) -> None:
        self._say(f"{self.path}: {error}; going on without the cache of answers")

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
            self._say(f"{self.path} is broken; it is now {aside.name}, and a new cache begins")
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        # Made by the thread that makes the client, used by the client's own.
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, check_same_thread=False)
        try:
            (owner,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and owner != _APPLICATION_ID:
                raise InputError(
                    f"config.llm.cache={self.path} is a database of something else; give another "
                    "file."
                )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # whole after a crash all the same
            with connection:
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT)"
                )
            connection.execute("SELECT key, answer FROM answers LIMIT 1").fetchone()
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While one process looks at a broken file, the others wait."""
        with self.path.with_name(f"{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _select(keys: Sequence[bytes], connection: sqlite3.Connection) -> list[tuple[bytes, str]]:
    marks = ",".join("?" * len(keys))
    query = f"SELECT key, answer FROM answers WHERE key IN ({marks})"  # noqa: S608
    return connection.execute(query, keys).fetchall()


def _is_broken(error: Exception) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _BROKEN


def _decode(text: str) -> Answer:
    fields = json.loads(text)
    fields["usage"] = Usage(**fields["usage"])
    for name in ("tokens", "token_ids", "log_probs"):
        fields[name] = tuple(fields[name])
    if fields["finish_reason"] not in ENDS:  # kept by an earlier version
        raise ValueError("no answer")
    return Answer(**fields | {"cached": True})

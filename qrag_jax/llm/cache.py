"""Caches answers in one SQLite file, which processes may share and a crash does not damage."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Answer, Usage

_APPLICATION_ID = 0x51524147  # "QRAG", in the file's header
_KEYS_PER_QUERY = 500  # SQLite's oldest limit is 999
_BUSY_SECONDS = 3.0  # other processes usually release the file within this time
# Errors that may pass: another process holds the file, the disk is full.
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)
# SQLite names what is damaged by bytes of the file, which may be no text.
_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)


class AnswerCache:
    """Answers by `outcomes.request_key`; the file holds no prompts and no API key.

    If another process holds the file for long, answers are not looked up or kept, which `skipped`
    counts. If the file cannot be used any more, the cache stops working, which is logged. All
    methods may wait for the disk and for others, so they must not run on an event loop.
    """

    def __init__(self, path: Path, log: Callable[[str], None], field: str = "cache") -> None:
        """`field` names the setting that gives the file, for messages."""
        self.path, self.skipped = path, 0
        self._log, self._lock, self._over = log, threading.Lock(), False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # One thread makes it and another uses it; `_lock` lets only one in at a time. Each
            # statement is a transaction.
            self._file = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None
            )
            self._prepare(field)
        except _ERRORS as error:
            raise InputError(
                f"{field}={path} cannot be opened ({error}); delete it, or give another file."
            ) from None

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        """The answers that the cache has, by key and marked as cached."""
        answers: dict[bytes, Answer] = {}
        for start in range(0, len(keys), _KEYS_PER_QUERY):
            part = keys[start : start + _KEYS_PER_QUERY]
            marks = ",".join("?" * len(part))
            query = f"SELECT key, answer FROM answers WHERE key IN ({marks})"  # noqa: S608
            for key, text in self._run(query, part, len(part)):
                fields = json.loads(text)
                fields |= {name: tuple(fields[name]) for name in ("token_ids", "log_probs")}
                usage = Usage(**fields["usage"])
                answers[key] = Answer(**fields | {"usage": usage, "cached": True})
        return answers

    def put(self, key: bytes, answer: Answer) -> None:
        row = key, json.dumps(dataclasses.asdict(answer))
        self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", row)

    def close(self) -> None:
        with self._lock:
            self._over = True
            self._file.close()

    def _run(self, statement: str, values: Sequence[Any], count: int = 1) -> list[Any]:
        """The rows that it selects; none if it is not possible, now or ever."""
        with self._lock:
            if self._over:
                return []
            try:
                return self._file.execute(statement, values).fetchall()
            except _ERRORS as error:
                if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _PASSING:
                    self.skipped += count
                else:
                    self._over = True
                    self._file.close()
                    self._log(f"{self.path}: {error}; going on without the cache of answers")
                return []

    def _prepare(self, field: str) -> None:
        # Of several processes that make the same file, only one may be here at a time.
        self._file.execute("BEGIN IMMEDIATE")
        (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (owner,) = self._file.execute("PRAGMA application_id").fetchone()
        if tables and owner != _APPLICATION_ID:
            raise InputError(
                f"{field}={self.path} is a database of something else; give another file."
            )
        self._file.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        self._file.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT)")
        self._file.execute("SELECT key, answer FROM answers LIMIT 1").fetchone()
        self._file.execute("COMMIT")
        # It is refused, without waiting, while another process uses a new file for the first time.
        with contextlib.suppress(sqlite3.OperationalError):
            self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("PRAGMA synchronous = NORMAL")  # enough to survive a crash

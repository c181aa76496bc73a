"""The log of a query rewriter: one JSON line for each query, what became of it, what it found."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import CAUSES
from qrag_jax.runtime import bounded_files
from qrag_jax.runtime.whole_files import write_whole

_FIX = "give --restart, or delete it"


@dataclasses.dataclass(frozen=True)
class RewriteRow:
    """One query, written anew in one way.

    Attributes:
        id: unique within its collection.
        collection: "" where there is one without a name.
        original: the query that was given.
        query: what was searched for; "" if there is none.
        outcome: one of `query_rewriting.output.OUTCOMES`, or the cause of a failure; "" if no model
            wrote the query.
        text: what the model wrote.
        found: ids and scores of documents, best first; None: nothing was searched.
        sampled: tokens.
        draw: number of the episode among those of this query.
    """

    id: str
    collection: str
    original: str
    query: str
    outcome: str = ""
    text: str = ""
    found: tuple[tuple[str, float], ...] | None = ()
    sampled: int = 0
    draw: int = 0

    @property
    def failed(self) -> bool:
        """Whether a call failed, so that nobody knows what the query would have found."""
        return self.outcome in CAUSES

    @property
    def ranking(self) -> tuple[str, ...]:
        """Ids of what was found, best first."""
        return tuple(name for name, _ in self.found or ())


def write(path: Path, rows: Iterable[RewriteRow], record: Mapping[str, Any]) -> None:
    """Writes a whole log, and beside it what it depends on.

    Raises:
        OSError: a file cannot be written.
    """
    # The record first: a log without one is nobody's.
    write_whole(path.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    write_whole(path, "".join(map(_line, rows)))


def append(path: Path, rows: Iterable[RewriteRow]) -> None:
    """Adds rows at the end of a log and waits until they are on disk.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(map(_line, rows)))
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[RewriteRow]:
    """Reads a whole log.

    Raises:
        InputError: the file cannot be read, or a line is not a row; names file and line.
    """
    try:
        with path.open("rb") as file:
            return [
                _row(line, f"{path}, line {number}")
                for number, line in enumerate(bounded_files.lines(file, path, _FIX), start=1)
            ]
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {_FIX}.") from None


def read_parts(path: Path, size: int, count: int) -> list[RewriteRow]:
    """The rows of the whole parts of a log that may have been cut off; drops what is behind.

    Args:
        size: rows of a part.
        count: rows of a finished log, whose last part may be smaller.

    Raises:
        InputError: a whole line is not a row; names file and line.
    """
    if not path.exists():
        return []
    rows, ends = list[RewriteRow](), [0]  # bytes up to the end of each line
    with path.open("rb+") as file:
        for number, line in enumerate(bounded_files.lines(file, path, _FIX), start=1):
            if not line.endswith(b"\n"):
                break
            rows.append(_row(line, f"{path}, line {number}"))
            ends.append(ends[-1] + len(line))
        whole = len(rows) if len(rows) >= count else len(rows) // size * size
        file.truncate(ends[whole])
    return rows[:whole]


def of_queries(rows: Sequence[RewriteRow], keys: Sequence[tuple[str, str]]) -> bool:
    """Whether the rows are of these (collection, id) pairs, in this order."""
    return [(row.collection, row.id) for row in rows] == [*keys]


def _line(row: RewriteRow) -> str:
    return json.dumps(dataclasses.asdict(row), ensure_ascii=False, allow_nan=False) + "\n"


def _row(line: bytes, place: str) -> RewriteRow:
    try:
        saved = json.loads(line)
        found = saved["found"]
        if found is not None:
            saved["found"] = tuple((str(name), float(score)) for name, score in found)
        return RewriteRow(**saved)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(f"{place}: is no row of this log; {_FIX}.") from None

"""The log of a query writer: one JSON line per question, its queries and pools hop by hop."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics.bootstrap import mean_interval, paired_interval
from qrag_jax.metrics.score_table import columns_text, interval_text
from qrag_jax.runtime import bounded_files
from qrag_jax.runtime.whole_files import write_whole

SHOWN = ("recall", "ap", "all_gold")
_FIX = "delete it"


@dataclasses.dataclass(frozen=True)
class Hop:
    """One hop of a question.

    Attributes:
        query: "" if there was none.
        outcome: what came of it; "" if no model wrote it.
        pool: ids of the passages found so far, in the pool's order.
        scores: of this pool.
        read, sampled: tokens.
        found: ids and scores of the passages that a model's query found, best first.
    """

    query: str
    outcome: str
    pool: tuple[str, ...]
    scores: Mapping[str, float]
    read: int = 0
    sampled: int = 0
    found: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Searched:
    """How one question was searched for.

    Attributes:
        id, question, answers: of the data set.
        pages: keys of its gold pages.
        hops: one after the other.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    pages: tuple[str, ...]
    hops: tuple[Hop, ...]


def write(path: Path, rows: Iterable[Searched], record: Mapping[str, Any]) -> None:
    """Writes a whole log, and beside it what it depends on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The record first: a log without one is nobody's.
    write_whole(path.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    write_whole(path, "".join(map(_line, rows)))


def append(path: Path, rows: Iterable[Searched]) -> None:
    """Adds rows at the end of a log and waits until they are on disk.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(map(_line, rows)))
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Searched]:
    """Reads a log.

    Raises:
        InputError: the file cannot be read or is empty, or a line is not a row; names file and
            line.
    """
    try:
        with path.open("rb") as file:
            rows = [
                _row(line, f"{path}, line {number}")
                for number, line in enumerate(bounded_files.lines(file, path, _FIX), start=1)
            ]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a log of queries hop by hop, as "
            "`qrag predict` and `qrag evaluate` write it."
        ) from None
    if not rows:
        raise InputError(f"{path} is empty; {_FIX}.")
    return rows


def read_parts(path: Path, size: int, count: int) -> list[Searched]:
    """The rows of the whole parts of a log that may have been cut off; drops what is behind.

    Args:
        size: rows of a part.
        count: rows of a finished log, whose last part may be smaller.

    Raises:
        InputError: a whole line is not a row; names file and line.
    """
    if not path.exists():
        return []
    rows, ends = list[Searched](), [0]  # bytes up to the end of each line
    with path.open("rb+") as file:
        for number, line in enumerate(bounded_files.lines(file, path, _FIX), start=1):
            if not line.endswith(b"\n"):
                break
            rows.append(_row(line, f"{path}, line {number}"))
            ends.append(ends[-1] + len(line))
        whole = len(rows) if len(rows) >= count else len(rows) // size * size
        file.truncate(ends[whole])
    return rows[:whole]


def is_one(path: Path) -> bool:
    """Whether a file is such a log, by its first line."""
    try:
        with path.open("rb") as file:
            first = json.loads(next(bounded_files.lines(file, path, _FIX), b"null"))
    except (OSError, ValueError, RecursionError, InputError):
        return False
    return isinstance(first, dict) and {"id", "pages", "hops"} <= first.keys()


def read_record(path: Path) -> dict[str, Any]:
    """What a log was made with; {} if nothing is beside it.

    Raises:
        InputError: that is no JSON object.
    """
    beside = path.with_suffix(".json")
    if not beside.is_file():
        return {}
    try:
        record = json.loads(beside.read_bytes())
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise InputError(f"{beside} is no JSON object; restore it, or write {path.name} again.")
    return record


def _line(row: Searched) -> str:
    return json.dumps(dataclasses.asdict(row), ensure_ascii=False, allow_nan=False) + "\n"


def _row(line: bytes, place: str) -> Searched:
    try:
        saved = json.loads(line)
        hops = tuple(
            Hop(
                **{
                    **hop,
                    "pool": tuple(hop["pool"]),
                    "found": tuple((name, score) for name, score in hop.get("found", ())),
                }
            )
            for hop in saved["hops"]
        )
        texts = {name: tuple(saved[name]) for name in ("answers", "pages")}
        return Searched(**{**saved, **texts, "hops": hops})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InputError(f"{place}: is no row of this log; {_FIX}.") from None


def column(rows: Sequence[Searched], hop: int, score: str) -> list[float]:
    """A score of each question after a hop, from 1."""
    return [row.hops[hop - 1].scores[score] for row in rows]


def summary(rows: Sequence[Searched]) -> dict[str, Any]:
    """Means with 95 % bootstrap intervals over questions, after each hop; and tokens a question."""
    found: dict[str, Any] = {"questions": len(rows)}
    for number in range(1, len(rows[0].hops) + 1):
        for score in rows[0].hops[number - 1].scores:
            found[f"hop{number}/{score}"] = _interval(mean_interval(column(rows, number, score)))
    for name in ("read", "sampled"):
        total = sum(getattr(hop, name) for row in rows for hop in row.hops)
        found[f"{name}_tokens"] = total / len(rows)
    asked = [hop.outcome for row in rows for hop in row.hops if hop.outcome]
    found["outcomes"] = {outcome: asked.count(outcome) for outcome in sorted(set(asked))}
    return found


def gains(rows: Sequence[Searched], others: Sequence[Searched]) -> dict[str, dict[str, float]]:
    """Paired mean differences on the same questions, after each hop, with their intervals."""
    return {
        f"hop{number}/{score}": _interval(
            paired_interval(column(rows, number, score), column(others, number, score))
        )
        for number in range(1, len(rows[0].hops) + 1)
        for score in SHOWN
    }


def table(summaries: Mapping[str, Mapping[str, Any]], hops: int) -> list[str]:
    """One line for each way to write queries."""
    names = [f"hop{number}/{score}" for number in range(1, hops + 1) for score in SHOWN]
    lines = [["", *names, "tokens read, written"]]
    for told, each in summaries.items():
        tokens = f"{each['read_tokens']:.0f}, {each['sampled_tokens']:.0f}"
        lines.append([told, *(interval_text(each[name]) for name in names), tokens])
    return columns_text(lines)


def _interval(found: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), found, strict=True))

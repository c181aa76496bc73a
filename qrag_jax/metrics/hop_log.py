"""The log of a query writer: one JSON line per question, its queries and pools hop by hop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.metrics.bootstrap import columns_text, interval_text, mean_interval, paired_interval
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.runtime import bounded_files, bounded_json

SHOWN = ("recall", "ap", "all_gold")
_FIX = "delete it"


@dataclasses.dataclass(frozen=True)
class Hop:
    """One hop of a question.

    Attributes:
        query: "" if there was none.
        outcome: what came of it, or the cause of a failure; "" if no model wrote it.
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
        source: of the question; see `data.query_question`.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    pages: tuple[str, ...]
    hops: tuple[Hop, ...]
    source: str = ""

    @property
    def failed(self) -> bool:
        """Whether a search or a server failed, so that nobody knows what the queries would find."""
        return any(hop.outcome in INFRASTRUCTURE for hop in self.hops)


LOG = RowLog(
    Searched,
    _FIX,
    lost="give a log of queries hop by hop, as `qrag predict` and `qrag evaluate` write it",
)
write, append, read_parts = LOG.write, LOG.append, LOG.read_parts


def read(path: Path) -> list[Searched]:
    """Reads a log."""
    rows = LOG.read(path)
    if not rows:
        raise InputError(f"{path} is empty; {_FIX}.")
    shape = _shape(rows[0])
    for number, row in enumerate(rows, 1):
        if _shape(row) != shape or not row.hops:
            raise InputError(
                f"{path}, line {number}: has other hops or scores than line 1, or none; {_FIX}."
            )
    return rows


def _shape(row: Searched) -> list[set[str]]:
    """The names of the scores after each hop, which all rows of a log share."""
    return [{*hop.scores} for hop in row.hops]


def is_one(path: Path) -> bool:
    """Whether a file is such a log, by its first line."""
    try:
        with path.open("rb") as file:
            first = bounded_json.parsed(next(bounded_files.lines(file, path, _FIX), b"null"))
    except (OSError, ValueError):  # InputError is a ValueError, too
        return False
    return isinstance(first, dict) and {"id", "pages", "hops"} <= first.keys()


def read_record(path: Path) -> dict[str, Any]:
    """What a log was made with; {} if nothing is beside it."""
    beside = path.with_suffix(".json")
    if not beside.is_file():
        return {}
    try:
        record = bounded_json.load(beside, finite=False)
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict):
        raise InputError(f"{beside} is no JSON object; restore it, or write {path.name} again.")
    return record


def column(rows: Sequence[Searched], hop: int, score: str) -> list[float]:
    """A score of each question after a hop, from 1."""
    return [row.hops[hop - 1].scores[score] for row in rows]


def summary(rows: Sequence[Searched]) -> dict[str, Any]:
    """Means with 95 % bootstrap intervals over questions, after each hop; and tokens a question.

    Questions that failed are counted and have no scores.
    """
    kept = [row for row in rows if not row.failed]
    failed = len(rows) - len(kept)
    found: dict[str, Any] = {"questions": len(rows), "failed": failed}
    found["failed_share"] = failed / len(rows)
    for number in range(1, len(rows[0].hops) + 1) if kept else ():
        for score in rows[0].hops[number - 1].scores:
            found[f"hop{number}/{score}"] = _interval(mean_interval(column(kept, number, score)))
    for name in ("read", "sampled"):
        total = sum(getattr(hop, name) for row in rows for hop in row.hops)
        found[f"{name}_tokens"] = total / len(rows)
    asked = [hop.outcome for row in rows for hop in row.hops if hop.outcome]
    found["outcomes"] = {outcome: asked.count(outcome) for outcome in sorted(set(asked))}
    return found


def gains(rows: Sequence[Searched], others: Sequence[Searched]) -> dict[str, dict[str, float]]:
    """Paired mean differences on the questions that failed in neither, after each hop."""
    both = [pair for pair in zip(rows, others, strict=True) if not any(row.failed for row in pair)]
    if not both:
        return {}
    rows, others = [a for a, _ in both], [b for _, b in both]
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
    lines = [["", *names, "tokens read, written", "failed"]]
    for told, each in summaries.items():
        tokens = f"{each['read_tokens']:.0f}, {each['sampled_tokens']:.0f}"
        cells = [interval_text(each[name]) if name in each else "-" for name in names]
        lines.append([told, *cells, tokens, f"{each['failed']} of {each['questions']}"])
    return columns_text(lines)


def _interval(found: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), found, strict=True))

"""The log of a query writer: one JSON line per question, its queries and pools hop by hop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics.bootstrap import mean_interval, paired_interval
from qrag_jax.metrics.score_table import columns_text, interval_text
from qrag_jax.runtime.whole_files import write_whole

SHOWN = ("recall", "ap", "all_gold")


@dataclasses.dataclass(frozen=True)
class Hop:
    """One hop of a question.

    Attributes:
        query: "" if there was none.
        outcome: what came of it; "" if no model wrote it.
        pool: ids of the passages found so far, in the pool's order.
        scores: of this pool.
        read, sampled: tokens.
    """

    query: str
    outcome: str
    pool: tuple[str, ...]
    scores: Mapping[str, float]
    read: int = 0
    sampled: int = 0


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
    lines = [json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    # The record first: a log without one is nobody's.
    write_whole(path.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    write_whole(path, "".join(lines))


def read(path: Path) -> list[Searched]:
    """Reads a log.

    Raises:
        InputError: a line is not a row; names file and line.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            saved = json.loads(line)
            hops = tuple(Hop(**{**hop, "pool": tuple(hop["pool"])}) for hop in saved["hops"])
            texts = {name: tuple(saved[name]) for name in ("answers", "pages")}
            rows.append(Searched(**{**saved, **texts, "hops": hops}))
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path}, line {number}: is no row of this log; delete it.") from None
    if not rows:
        raise InputError(f"{path} is empty; delete it.")
    return rows


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

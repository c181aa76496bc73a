"""Scores of answers with their intervals: over all, by number of hops and by type of question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from qrag_jax.metrics.answer_log import AnswerRow, Miss
from qrag_jax.metrics.bootstrap import columns_text, interval_text
from qrag_jax.metrics.facts import with_intervals

_INDENT = "  "


def answer_scores(
    rows: Sequence[AnswerRow], misses: Sequence[Miss], verdicts: Mapping[str, bool] | None = None
) -> dict[str, dict[str, Any]]:
    """Scores by group: "all", then numbers of hops ("2 hops"), then types of question.

    Numbers of hops are groups only if there are several of them. The same holds for types.

    Args:
        rows: answers, one per question.
        misses: questions without an answer. They score 0, but for those that `failed`, which are
            left out.
        verdicts: the judge's verdicts by id; None if there was no judge.

    Returns:
        For each group: `em`, `f1` and, with a judge, `judge`, each as {"mean", "low", "high"} with
        a 95% bootstrap interval; a score without values is left out. Also the counts `answered`,
        `broken` (the model gave no answer), `failed` and, with a judge, `judged`; and
        `broken_share` and `failed_share`, of all questions.
    """
    scores = {"all": _scores(rows, misses, verdicts)}
    everything: list[AnswerRow | Miss] = [*rows, *misses]
    hops = sorted({each.hops for each in everything})
    for number in hops if len(hops) > 1 else ():
        scores[f"{number} hop{'s' * (number != 1)}"] = _scores(
            [row for row in rows if row.hops == number],
            [miss for miss in misses if miss.hops == number],
            verdicts,
        )
    types = sorted({each.type for each in everything})
    for name in types if len(types) > 1 else ():
        scores[name or "no type"] = _scores(
            [row for row in rows if row.type == name],
            [miss for miss in misses if miss.type == name],
            verdicts,
        )
    return scores


def table(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The scores as lines of text, one per group; "-" if a group has no such score."""
    judge = any("judged" in group for group in scores.values())
    columns = ("em", "f1", *(("judge",) if judge else ()))
    counts = ("answered", "broken", "failed")
    lines = [["", *columns, *counts]]
    for name, group in scores.items():
        cells = [interval_text(group[c]) if c in group else "-" for c in columns]
        label = name if name == "all" else _INDENT + name
        lines.append([label, *cells, *(str(group[count]) for count in counts)])
    return columns_text(lines)


class HasCause(Protocol):
    """A question or an answer that failed for some cause."""

    @property
    def cause(self) -> str:
        """A short word for the cause."""
        ...


def causes_text(misses: Iterable[HasCause]) -> str:
    """How often each cause occurs, the most frequent first: `timeout 3, too_long 1`."""
    counts = Counter(miss.cause for miss in misses)
    return ", ".join(f"{cause} {count}" for cause, count in counts.most_common())


def _scores(
    rows: Sequence[AnswerRow], misses: Sequence[Miss], verdicts: Mapping[str, bool] | None
) -> dict[str, Any]:
    failed = sum(miss.failed for miss in misses)
    broken = [0.0] * (len(misses) - failed)
    columns = {"em": [row.em for row in rows] + broken, "f1": [row.f1 for row in rows] + broken}
    judged = [float(verdicts[row.id]) for row in rows if row.id in verdicts] if verdicts else []
    if verdicts is not None:
        columns["judge"] = judged + broken
    scores: dict[str, Any] = with_intervals({n: c for n, c in columns.items() if c})
    counts = {"broken": len(broken), "failed": failed}
    questions = max(len(rows) + len(misses), 1)
    scores |= {"answered": len(rows), **counts}
    scores |= {f"{name}_share": count / questions for name, count in counts.items()}
    return scores | ({"judged": len(judged)} if verdicts is not None else {})

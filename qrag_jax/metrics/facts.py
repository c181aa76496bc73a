"""Fact metrics: how well the chunks taken cover the supporting facts of a question.

Chunks are named by their index in the document. `support` is the set of supporting facts,
`predicted` the chunks taken, in the order taken. Sources: HotpotQA (Yang et al., 2018) for EM and
F1 over sets of supporting facts; Q-RAG (arXiv 2511.07328), where EM asks only that no supporting
fact is missing, because the number of steps is fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qrag_jax.metrics.answer_places import answer_place, worded
from qrag_jax.metrics.bootstrap import with_intervals
from qrag_jax.metrics.rows import Row


def fact_em(support: Iterable[int], predicted: Sequence[int]) -> float:
    """1.0 if every supporting fact was taken, else 0.0; other chunks taken do not matter."""
    gold, taken = set(support), set(predicted)
    return float(gold <= taken)


def fact_precision(support: Iterable[int], predicted: Sequence[int]) -> float:
    """Share in [0, 1] of the distinct chunks taken that are supporting facts; 0.0 if none taken."""
    gold, taken = set(support), set(predicted)
    return len(gold & taken) / len(taken) if taken else 0.0


def fact_recall(support: Iterable[int], predicted: Sequence[int]) -> float:
    """Share in [0, 1] of the supporting facts that were taken; 0.0 if nothing was taken."""
    gold, taken = set(support), set(predicted)
    return len(gold & taken) / len(gold)


def fact_f1(support: Iterable[int], predicted: Sequence[int]) -> float:
    """Harmonic mean of precision and recall over index sets; 0.0 if no fact was taken."""
    gold, taken = set(support), set(predicted)
    # 2PR/(P+R) with P = hits/|taken| and R = hits/|gold|, without the 0/0 of no hit.
    return 2.0 * len(gold & taken) / (len(gold) + len(taken))


_SCORES = {
    "fact_em": fact_em,
    "fact_f1": fact_f1,
    "fact_precision": fact_precision,
    "fact_recall": fact_recall,
}


def fact_columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Fact metrics and `steps` (chunks taken) of each row, computed from its indices."""
    columns = {
        name: [score(row.sf_idx, row.pred_idx) for row in rows] for name, score in _SCORES.items()
    }
    return columns | {"steps": [float(len(row.pred_idx)) for row in rows]}


def score_columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """What can be said of each row, by the name of the score.

    Scores that need the supporting facts are of the rows that have them, and are left out where
    none has. Where some lack them there is also `answer_found`: whether an answer stands in one of
    the chunks taken, of the rows whose answers have words. `return` is of the rows that have one.
    """
    known = [row for row in rows if row.sf_idx]
    columns = fact_columns(known) if known else {}
    columns["steps"] = [float(len(row.pred_idx)) for row in rows]
    if len(known) < len(rows):
        asked = [(row, worded((row.answer, *row.aliases))) for row in rows]
        found = [answer_place(row.pred_texts, answers) for row, answers in asked if answers]
        columns["answer_found"] = [float(place > 0) for place in found]
    columns["return"] = [row.ret for row in rows if row.ret is not None]
    return {name: values for name, values in columns.items() if values}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Means of a retrieval log with their 95% bootstrap intervals.

    Returns:
        The metrics of `score_columns`, and `recall@1` … `recall@K` of the rows with supporting
        facts, K being the length of the longest prediction, each as {"mean", "low", "high"}. Also
        `samples`, the number of rows, and `with_facts`, of rows with facts if some have none.
    """
    columns = score_columns(rows)
    known = [row for row in rows if row.sf_idx]
    for k in range(1, max((len(row.pred_idx) for row in known), default=0) + 1):
        columns[f"recall@{k}"] = [fact_recall(row.sf_idx, row.pred_idx[:k]) for row in known]
    if "return" in columns:
        columns["return"] = columns.pop("return")  # the last one
    counts = {"samples": len(rows)}
    if len(known) < len(rows):
        counts["with_facts"] = len(known)
    return {**with_intervals(columns), **counts}

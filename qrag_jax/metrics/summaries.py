"""Summaries of logs: means with 95 % bootstrap intervals over the questions, counts, tables.

What the MODEL broke scores 0 and is counted as `broken`. What the infrastructure broke is left out,
and counted as `failed`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from qrag_jax.metrics.bootstrap import columns_text, gains, score_table, with_intervals
from qrag_jax.metrics.rows import AgentRow, AnswerRow, Miss, RewardRow, Searched

ALL = "all"
_DIGITS = 9  # of a reward; what follows is the rounding of sums in another order

Item = TypeVar("Item")


def grouped(items: Sequence[Item], *fields: str) -> dict[str, list[Item]]:
    """The items by group: "all", then by each field of which there are several values.

    Numbers are of hops ("2 hops"), and texts are types of question.
    """
    groups = {ALL: [*items]}
    for field in fields:
        values = sorted({getattr(each, field) for each in items})
        for value in values if len(values) > 1 else ():
            name = value or "no type"
            if isinstance(value, int):
                name = f"{value} hop{'s' * (value != 1)}"
            groups[name] = [each for each in items if getattr(each, field) == value]
    return groups


def indented(group: str) -> str:
    """What the line of a group is called in a table."""
    return group if group == ALL else f"  {group}"


def shares(counts: Mapping[str, int], questions: int) -> dict[str, float]:
    """The counts as shares of the questions."""
    return {f"{name}_share": count / max(questions, 1) for name, count in counts.items()}


def causes_text(misses: Iterable[Any]) -> str:
    """How often each cause occurs, the most frequent first: `timeout 3, too_long 1`."""
    counts = Counter(miss.cause for miss in misses)
    return ", ".join(f"{cause} {count}" for cause, count in counts.most_common())


# ---------------------------------------------------------------------------- answers


def answer_scores(
    rows: Sequence[AnswerRow], misses: Sequence[Miss], verdicts: Mapping[str, bool] | None = None
) -> dict[str, dict[str, Any]]:
    """Scores by group: "all", then numbers of hops ("2 hops"), then types of question.

    Args:
        verdicts: the judge's verdicts by id; None if there was no judge.

    Returns:
        For each group, if there are values: `em`, `f1` and, with a judge, `judge`, each as {"mean",
        "low", "high"}; the counts `answered`, `broken` (the model gave no answer), `failed` and,
        with a judge, `judged`; and `broken_share` and `failed_share`.
    """
    everything: list[AnswerRow | Miss] = [*rows, *misses]
    groups = grouped(everything, "hops", "type")
    return {name: _answer_scores(items, verdicts) for name, items in groups.items()}


def _answer_scores(
    items: Sequence[AnswerRow | Miss], verdicts: Mapping[str, bool] | None
) -> dict[str, Any]:
    rows = [each for each in items if isinstance(each, AnswerRow)]
    failed = sum(isinstance(each, Miss) and each.failed for each in items)
    broken = [0.0] * (len(items) - len(rows) - failed)
    columns = {"em": [row.em for row in rows] + broken, "f1": [row.f1 for row in rows] + broken}
    counts = {"broken": len(broken), "failed": failed}
    summary = {"answered": len(rows), **counts, **shares(counts, len(items))}
    if verdicts is not None:
        right = [float(verdicts[row.id]) for row in rows if row.id in verdicts]
        columns["judge"] = right + broken
        summary["judged"] = len(right)
    return {**with_intervals(columns), **summary}


def answer_table(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The scores as lines of text, one per group; "-" if a group has no such score."""
    judge = any("judged" in group for group in scores.values())
    lines = ((indented(name), group) for name, group in scores.items())
    counts = {count: f"{{{count}}}" for count in ("answered", "broken", "failed")}
    return score_table(lines, ("em", "f1", "judge") if judge else ("em", "f1"), counts)


# ---------------------------------------------------------------------------- agents


def agent_summary(rows: Sequence[AgentRow]) -> dict[str, Any]:
    """Scores of an agent; recall is of those whose gold passages are all in the corpus."""
    kept = [row for row in rows if not row.failed]
    columns: dict[str, list[float]] = {
        "em": [row.em for row in kept],
        "f1": [row.f1 for row in kept],
        "recall": [row.recall for row in kept if row.recall is not None],
        "hops": [float(len(row.searches)) for row in kept],
    }
    counts = {"broken": sum(bool(row.broken) for row in kept), "failed": len(rows) - len(kept)}
    of_all = {"questions": len(rows), **counts, **shares(counts, len(rows))}
    return of_all | with_intervals(columns)


def pass_at(k: int, right: int, sampled: int) -> float:
    """The chance that one of k episodes is right, estimated without bias from `sampled` of them.

    `1 − C(n − c, k) / C(n, k)` (Chen et al., arXiv 2107.03374, eq. 1); k is at most n.
    """
    missed = 1.0
    for i in range(k):
        missed *= max(sampled - right - i, 0) / (sampled - i)
    return 1.0 - missed


# ---------------------------------------------------------------------------- query writers

SHOWN = ("recall", "ap", "all_gold")  # scores of a pool that a table shows


def hop_columns(rows: Sequence[Searched]) -> dict[str, list[float]]:
    """The scores of each question after each hop, `hopN/SCORE`."""
    return {
        f"hop{number}/{score}": [row.hops[number - 1].scores[score] for row in rows]
        for number in range(1, len(rows[0].hops) + 1 if rows else 1)
        for score in rows[0].hops[number - 1].scores
    }


def hop_summary(rows: Sequence[Searched]) -> dict[str, Any]:
    """Scores after each hop; and tokens a question."""
    kept = [row for row in rows if not row.failed]
    counts = {"failed": len(rows) - len(kept)}
    summary: dict[str, Any] = {"questions": len(rows), **counts, **shares(counts, len(rows))}
    summary |= with_intervals(hop_columns(kept))
    for name in ("read", "sampled"):
        total = sum(getattr(hop, name) for row in rows for hop in row.hops)
        summary[f"{name}_tokens"] = total / len(rows)
    outcomes = Counter(hop.outcome for row in rows for hop in row.hops if hop.outcome)
    return summary | {"outcomes": {name: outcomes[name] for name in sorted(outcomes)}}


def hop_gains(rows: Sequence[Searched], others: Sequence[Searched]) -> dict[str, dict]:
    """Paired differences on the questions that failed in neither, after each hop."""
    both = [pair for pair in zip(rows, others, strict=True) if not any(row.failed for row in pair)]
    main, theirs = (hop_columns(side) for side in ([a for a, _ in both], [b for _, b in both]))
    shown = {name: values for name, values in main.items() if name.split("/")[1] in SHOWN}
    return gains(shown, theirs)


def hop_table(summaries: Mapping[str, Mapping[str, Any]], hops: int) -> list[str]:
    """One line for each way to write queries."""
    names = [f"hop{number}/{score}" for number in range(1, hops + 1) for score in SHOWN]
    counts = {
        "tokens read, written": "{read_tokens:.0f}, {sampled_tokens:.0f}",
        "failed": "{failed} of {questions}",
    }
    return score_table(summaries.items(), names, counts)


# ---------------------------------------------------------------------------- rewards


def reward_row(
    asked: tuple[str, str], rewards: Sequence[float | str], least_std: float = 0.0
) -> RewardRow:
    """The row of a question."""
    rounded = [None if isinstance(each, str) else round(each, _DIGITS) for each in rewards]
    known = [each for each in rounded if each is not None]
    row = RewardRow(
        *asked,
        mean=statistics.fmean(known) if known else None,
        std=statistics.pstdev(known) if known else None,
        rewards=rounded,
        scored=len(known),
        broken=[each for each in rewards if isinstance(each, str)],
        kept=False,
    )
    return judged(row, least_std)


def judged(row: RewardRow, least_std: float) -> RewardRow:
    """The row with another threshold."""
    return dataclasses.replace(row, kept=row.std is not None and row.std > least_std)


def reward_lines(rows: Sequence[RewardRow], least_std: float) -> list[str]:
    """Lines on what is kept."""
    kept = sum(row.kept for row in rows)
    without = sum(row.std is None for row in rows)
    rewards = [reward for row in rows for reward in row.rewards if reward is not None]
    mean = f"{statistics.fmean(rewards):.3f}" if rewards else "unknown"
    few = "varies too little" if least_std else "all the same"
    lines = [
        ["kept", f"{kept} of {len(rows)} questions, standard deviation above {least_std:g}"],
        [few, f"{len(rows) - kept - without}"],
        ["without reward", f"{without}"],
        ["mean reward", f"{mean} of {len(rewards)} episodes"],
    ]
    if causes := Counter(cause for row in rows for cause in row.broken):
        counts = (f"{causes[cause]} {cause}" for cause in sorted(causes))
        lines.append(["broken episodes", ", ".join(counts)])
    return columns_text(lines)

"""Scores of a query writer after each hop, on fixed questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qrag_jax.environments.queries import EMPTY, OUTCOMES, STOPPED, TOO_LONG, QueryState
from qrag_jax.evaluators.evaluation import Evaluation, sampler
from qrag_jax.feedback.pairs import ALL_GOLD, AP, RECALL, Try
from qrag_jax.metrics.rows import HOPS, Hop, Searched
from qrag_jax.metrics.summaries import hop_columns


class HopRow(NamedTuple):
    """A question after a hop."""

    before: QueryState  # before, after: the states around it
    after: QueryState
    scores: dict[str, float]  # of the pool after it
    made: Try | None = None  # the try of this hop; None: the search had ended before
    read: int = 0  # tokens of the prompt; 0 if no model read any


def query_evaluation(step: int, rows: Sequence[Searched], best_by: str) -> Evaluation:
    """Scores the played questions of a training."""
    scores, last = hop_scores(rows), len(rows[0].hops)
    names = {"recall": RECALL, "AP": AP, "all gold": ALL_GOLD}
    parts = [
        f"hop {hop}: " + ", ".join(f"{k} {scores[f'hop{hop}/{v}']:.3f}" for k, v in names.items())
        for hop in range(1, last + 1)
    ]
    lost = scores["empty_share"] + scores["too_long_share"] + scores["failed_share"]
    without = f"; {lost:.1%} without a query" if lost else ""
    return Evaluation.of(
        f"step {step}: {'; '.join(parts)}{without}; {len(rows)} questions",
        scores,
        f"hop{last}/{best_by}",
        episodes=sampler(HOPS, lambda at: [rows[place] for place in at], len(rows)),
        each=[row.hops[-1].scores[best_by] for row in rows if not row.failed],
    )


def hop_scores(rows: Sequence[Searched]) -> dict[str, float]:
    """Means over the questions: `hopN/SCORE` after each hop, and what the queries took.

    A query that is empty or too long finds nothing: the pool stays as it was. A question with a hop
    that failed is left out of the scores.
    """
    columns = hop_columns([row for row in rows if not row.failed])
    scores = {name: float(np.mean(columns.get(name) or 0.0)) for name in hop_columns(rows)}
    hops = [hop for row in rows for hop in row.hops]
    outcomes = Counter(hop.outcome for hop in hops if hop.outcome)  # of what a model wrote
    count = max(outcomes.total(), 1)
    known = {"empty_share": EMPTY, "too_long_share": TOO_LONG, "stopped_share": STOPPED}
    failed = sum(number for outcome, number in outcomes.items() if outcome not in OUTCOMES)
    return {
        **scores,
        **{name: outcomes[outcome] / count for name, outcome in known.items()},
        "failed_share": failed / count,
        "sampled_tokens": sum(hop.sampled for hop in hops) / len(rows),
        "read_tokens": sum(hop.read for hop in hops) / len(rows),
    }


def logged(shown: Sequence[QueryState], hops: Sequence[Sequence[HopRow]]) -> list[Searched]:
    """Played questions as rows of a log."""
    played = zip(shown, zip(*hops, strict=True), strict=True)
    return [
        Searched(
            state.id,
            state.question,
            state.answers,
            state.pages,
            tuple(map(_logged, rows)),
            state.source,
        )
        for state, rows in played
    ]


def _logged(row: HopRow) -> Hop:
    made, pool = row.made, tuple(each.id for each in row.after.pool)
    if made is None:
        return Hop("", "", pool, row.scores)
    sampled = len(made.sampled)
    return Hop(made.query, made.outcome, pool, row.scores, row.read, sampled, made.found)

"""Scores of a query writer after each hop, on fixed questions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from qrag_jax.environments.queries import EMPTY, OUTCOMES, STOPPED, TOO_LONG, QueryState
from qrag_jax.evaluators.evaluation import Evaluation, sampler
from qrag_jax.feedback.pairs import ALL_GOLD, AP, RECALL, Try
from qrag_jax.metrics.rows import HOPS, Hop, Searched
from qrag_jax.metrics.summaries import hop_columns


@dataclasses.dataclass(frozen=True, slots=True)
class HopRow:
    """A question after a hop."""

    scores: dict[str, float]  # of its pool
    query: str  # of this hop; "" if there was none
    before: QueryState  # before, after: the states around it
    after: QueryState
    # The try of this hop; None: the search had ended before, or no model wrote the query
    made: Try | None = None
    read: int = 0  # tokens of the prompt; 0 if no model read any
    outcome: str = ""  # of the try, or the cause by which a rule's search failed; "": none of these


def query_evaluation(step: int, rows: Sequence[Searched], best_by: str) -> Evaluation:
    """Scores the played questions of a training."""
    scores, last = hop_scores(rows), len(rows[0].hops)
    parts = [_told(hop, scores) for hop in range(1, last + 1)]
    lost = scores["empty_share"] + scores["too_long_share"] + scores["failed_share"]
    without = f"; {lost:.1%} without a query" if lost else ""
    return Evaluation.of(
        f"step {step}: {'; '.join(parts)}{without}; {len(rows)} questions",
        scores,
        f"hop{last}/{best_by}",
        episodes=sampler(HOPS, lambda at: [rows[place] for place in at], len(rows)),
        each=[row.hops[-1].scores[best_by] for row in rows if not row.failed],
    )


def _told(hop: int, scores: Mapping[str, float]) -> str:
    recall, ap, every = (scores[f"hop{hop}/{name}"] for name in (RECALL, AP, ALL_GOLD))
    return f"hop {hop}: recall {recall:.3f}, AP {ap:.3f}, all gold {every:.3f}"


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
    return [
        Searched(
            state.id,
            state.question,
            state.answers,
            state.pages,
            tuple(_logged(rows[place]) for rows in hops),
            state.source,
        )
        for place, state in enumerate(shown)
    ]


def _logged(row: HopRow) -> Hop:
    made, pool = row.made, tuple(each.id for each in row.after.pool)
    if made is None:
        return Hop(row.query, row.outcome, pool, row.scores, row.read)
    sampled = len(made.sampled)
    return Hop(row.query, row.outcome, pool, row.scores, row.read, sampled, made.found)

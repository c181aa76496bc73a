"""Scores of a query writer after each hop, on fixed questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.query_writing.state import EMPTY, STOPPED, TOO_LONG, QueryState
from qrag_jax.evaluators.episode_sample import Sampler, sampler
from qrag_jax.evaluators.episode_views import HOPS
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.feedback.tries import ALL_GOLD, AP, RECALL, Try
from qrag_jax.metrics import hop_log
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.runtime.interrupt import StopSignal

# (parameters, step, signal) → by hop, a row for each question.
PlayHops = Callable[[Any, int, StopSignal], Sequence[Sequence["HopRow"]]]


@dataclasses.dataclass(frozen=True, slots=True)
class HopRow:
    """A question after a hop.

    Attributes:
        scores: of its pool.
        query: of this hop; "" if there was none.
        before, after: the states around it.
        made: the try of this hop; None: the search had ended before, or no model wrote the query.
        read: tokens of the prompt; 0 if no model read any.
        outcome: of the try, or the cause by which a rule's search failed; "": none of these.
    """

    scores: dict[str, float]
    query: str
    before: QueryState
    after: QueryState
    made: Try | None = None
    read: int = 0
    outcome: str = ""


@dataclasses.dataclass(frozen=True)
class QueryScores:
    """Scores fixed questions.

    Attributes:
        play: plays all of them once, hop by hop.
        best_by: the score after the last hop that chooses the best checkpoint.
        shown: the questions, for a log of their episodes; (): none is kept.
    """

    play: PlayHops
    best_by: str
    shown: Sequence[QueryState] = ()

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the questions.

        Raises:
            Stopped: the run is told to stop.
        """
        hops = self.play(params, step, stop)
        scores = hop_scores(hops)
        last = len(hops)
        parts = [_told(hop, scores) for hop in range(1, last + 1)]
        lost = scores["empty_share"] + scores["too_long_share"] + scores["failed_share"]
        without = f"; {lost:.1%} without a query" if lost else ""
        return Evaluation(
            metrics={f"eval/{name}": value for name, value in scores.items()},
            baselines={f"untrained/{name}": value for name, value in scores.items()},
            line=f"step {step}: {'; '.join(parts)}{without}; {len(hops[0])} questions",
            score=scores[f"hop{last}/{self.best_by}"],
            scores=scores,
            episodes=self._sampler(hops),
            each=[hops[-1][place].scores[self.best_by] for place in _whole(hops)],
        )

    def _sampler(self, hops: Sequence[Sequence[HopRow]]) -> Sampler:
        def rows(places: Sequence[int]) -> list[hop_log.Searched]:
            own = [[hop[place] for place in places] for hop in hops]
            return logged([self.shown[place] for place in places], own)

        return sampler(HOPS, rows, len(self.shown))


def _told(hop: int, scores: dict[str, float]) -> str:
    recall, ap, every = (scores[f"hop{hop}/{name}"] for name in (RECALL, AP, ALL_GOLD))
    return f"hop {hop}: recall {recall:.3f}, AP {ap:.3f}, all gold {every:.3f}"


def hop_scores(hops: Sequence[Sequence[HopRow]]) -> dict[str, float]:
    """Means over the questions: `hopN/SCORE` after each hop, and what the queries took.

    A query that is empty or too long finds nothing: the pool stays as it was. A question with a hop
    that failed is left out of the scores.
    """
    found, whole = {}, _whole(hops)
    for number, rows in enumerate(hops, start=1):
        for name in rows[0].scores:
            values = [rows[place].scores[name] for place in whole]
            found[f"hop{number}/{name}"] = float(np.mean(values)) if values else 0.0
    made = [row.made for rows in hops for row in rows if row.made is not None]
    outcomes = [each.outcome for each in made]
    count = max(len(made), 1)
    known = {"empty_share": EMPTY, "too_long_share": TOO_LONG, "stopped_share": STOPPED}
    shares = {name: outcomes.count(outcome) / count for name, outcome in known.items()}
    questions = len(hops[0])
    return {
        **found,
        **shares,
        "failed_share": sum(not each.scored for each in made) / count
        - shares["empty_share"]
        - shares["too_long_share"],
        "sampled_tokens": sum(len(each.sampled) for each in made) / questions,
        "read_tokens": sum(row.read for rows in hops for row in rows) / questions,
    }


def _whole(hops: Sequence[Sequence[HopRow]]) -> list[int]:
    """The places of the questions of which no hop failed."""
    return [
        place
        for place, rows in enumerate(zip(*hops, strict=True))
        if not any(row.outcome in INFRASTRUCTURE for row in rows)
    ]


def logged(shown: Sequence[QueryState], hops: Sequence[Sequence[HopRow]]) -> list[hop_log.Searched]:
    """Played questions as rows of a log.

    Args:
        shown: the questions.
        hops: by hop, a row for each of them.
    """
    return [
        hop_log.Searched(
            state.id,
            state.question,
            state.answers,
            state.pages,
            tuple(_logged(rows[place]) for rows in hops),
            state.source,
        )
        for place, state in enumerate(shown)
    ]


def _logged(row: HopRow) -> hop_log.Hop:
    made, pool = row.made, tuple(each.id for each in row.after.pool)
    if made is None:
        return hop_log.Hop(row.query, row.outcome, pool, row.scores, row.read)
    sampled = len(made.sampled)
    return hop_log.Hop(row.query, row.outcome, pool, row.scores, row.read, sampled, made.found)

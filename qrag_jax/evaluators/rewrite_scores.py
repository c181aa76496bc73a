"""Scores of a query rewriter on fixed queries: what its queries find, and what they look like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Failed
from qrag_jax.evaluators.episode_sample import played_sampler
from qrag_jax.evaluators.episode_views import REWRITES
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.feedback.rewrite import GUARD_MEASURES, guard_measures
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.interrupt import StopSignal

# (parameters, signal) → an episode for each query, in order.
PlayAll = Callable[[Any, StopSignal], Sequence[TokenEpisode]]
Rankings = Sequence[Sequence[str] | None]  # of each query, best first; None: its search failed
# signal → what each original query finds.
Originals = Callable[[StopSignal], Rankings]


@dataclasses.dataclass(frozen=True)
class RewriteScores:
    """Scores fixed queries.

    Attributes:
        tasks: the queries.
        play: plays all of them once.
        originals: searches the original queries; asked in each evaluation.
        measures: of rankings, see `metrics.ranking`.
        best_by: the measure that chooses the best checkpoint.
        logged: (places of queries, their episodes) → rows to look at; None: there are none.
    """

    tasks: Sequence[RewriteTask]
    play: PlayAll
    originals: Originals
    measures: Sequence[str]
    best_by: str
    logged: Callable[[Sequence[int], Sequence[TokenEpisode]], Sequence[RewriteRow]] | None = None

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the queries.

        Raises:
            Stopped: the run is told to stop.
        """
        episodes = self.play(params, stop)
        original = means(measured(self.tasks, self.originals(stop), self.measures))
        columns = measured(self.tasks, rankings_of(episodes), self.measures)
        scores = means(columns)
        shapes = shape_of_queries(self.tasks, episodes)
        failed = f", {share:.0%} failed" if (share := shapes["failed_share"]) else ""
        told = ", ".join(
            f"{name} {scores[name]:.3f} ({original[name]:.3f} by the originals)"
            for name in self.measures
        )
        every = scores | shapes
        return Evaluation(
            metrics={f"eval/{name}": value for name, value in every.items()},
            baselines={f"untrained/{name}": value for name, value in every.items()}
            | {f"original/{name}": value for name, value in original.items()},
            line=(
                f"step {step}: {told}, {shapes['format']:.0%} readable, "
                f"{shapes['query_words']:.1f} words{failed} on {len(self.tasks)} queries"
            ),
            score=scores[self.best_by],
            scores=every,
            episodes=played_sampler(REWRITES, self.logged, episodes),
            each=columns[self.best_by],
        )


def rankings_of(episodes: Sequence[TokenEpisode]) -> list[tuple[str, ...] | None]:
    """What each episode found, best first; () if it has no query, None if it failed."""
    return [
        tuple(each.id for each in episode.ended.found)
        if isinstance(episode.ended, Rewritten)
        else None
        for episode in episodes
    ]


def measured(
    tasks: Sequence[RewriteTask], rankings: Rankings, measures: Sequence[str]
) -> dict[str, list[float]]:
    """Each measure of each query whose search has not failed, in order."""
    # Names, since ids of collections may be alike.
    ranked = {f"{n}": ranking for n, ranking in enumerate(rankings) if ranking is not None}
    if not ranked:
        return {measure: [] for measure in measures}
    qrels = {name: dict(tasks[int(name)].grades) for name in ranked}
    columns = ranking_columns(ranked, qrels, measures)
    return {measure: [column[name] for name in ranked] for measure, column in columns.items()}


def means(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of each column, 0 of nothing."""
    return {name: float(np.mean(column)) if column else 0.0 for name, column in columns.items()}


def shape_of_queries(
    tasks: Sequence[RewriteTask], episodes: Sequence[TokenEpisode]
) -> dict[str, float]:
    """Means over the episodes that did not fail: `format` (share with a query, even one that the
    search cannot read, as in the reward), `sampled_tokens`, and over those with a query
    `GUARD_MEASURES`; and `failed_share`.
    """
    rows: list[dict[str, float]] = []
    searched = []
    for task, episode in zip(tasks, episodes, strict=True):
        ended = episode.ended
        if isinstance(ended, Failed):
            continue
        assert isinstance(ended, Rewritten)
        tokens = sum(len(turn.sampled) for segment in episode.segments for turn in segment)
        rows.append({"format": float(bool(ended.answer)), "sampled_tokens": float(tokens)})
        if ended.answer:
            searched.append(guard_measures(task.question, ended.answer, task.answers))
    found = {name: _mean(rows, name) for name in ("format", "sampled_tokens")}
    found |= {name: _mean(searched, name) for name in GUARD_MEASURES}
    return found | {"failed_share": 1 - len(rows) / max(len(tasks), 1)}


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.mean([row[name] for row in rows])) if rows else 0.0

"""Scores of a query encoder by the episodes of an agent, searched greedily."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qrag_jax.environments.rag.episode import Broken
from qrag_jax.evaluators.agent_rows import agent_row
from qrag_jax.evaluators.episode_sample import AGENTS, sampler
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.feedback.rag import Gold
from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.metrics import answers, hops
from qrag_jax.rollouts.agents import Episode
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import Stopped, StopSignal

BEST_BY = ("f1", "em", "recall")

# (parameters, places of the questions, signal) → an episode for each of them, in order.
PlayAll = Callable[[Any, Sequence[int], StopSignal], Sequence[Episode]]

_COLUMNS = ("em", "f1", "recall", "hops", "broken")


@dataclasses.dataclass(frozen=True)
class AgentScores:
    """Scores fixed questions; of several hosts, each plays its part of them.

    Attributes:
        golds: what is right for each question.
        play: plays questions once.
        best_by: the score that chooses the best checkpoint.
    """

    golds: Sequence[Gold]
    play: PlayAll
    best_by: str

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the questions; all hosts call this together.

        Raises:
            Stopped: the run is told to stop, on this host or another.
            FeedbackLost: the language model of a host is gone.
        """
        rows, played = self._rows(params, stop)
        scores = means(rows)
        broken = f", {share:.0%} broken" if (share := scores["broken_share"]) else ""
        found = f", recall {scores['recall']:.3f}" if "recall" in scores else ""
        line = (
            f"step {step}: EM {scores['em']:.3f}, F1 {scores['f1']:.3f}{found}, "
            f"{scores['hops']:.2f} searches{broken} on {len(self.golds)} questions"
        )
        return Evaluation(
            metrics={f"eval/{name}": value for name, value in scores.items()},
            baselines={f"untrained/{name}": value for name, value in scores.items()},
            line=line,
            score=scores[self.best_by],
            scores=scores,
            episodes=sampler(
                AGENTS, lambda at: [agent_row(*played[each]) for each in at], len(played)
            ),
            each=[value for value in rows[:, _COLUMNS.index(self.best_by)] if not np.isnan(value)],
        )

    def _rows(self, params: Any, stop: StopSignal) -> tuple[np.ndarray, list[tuple[Gold, Episode]]]:
        """See `score_rows`, of all questions in their order; and the episodes of this host."""
        index, count = jax.process_index(), jax.process_count()
        own = range(len(self.golds))[index::count]
        rows = np.full((-(-len(self.golds) // count), len(_COLUMNS)), np.nan)
        golds, played = [self.golds[place] for place in own], list[Episode]()
        failure: Exception | None = None
        try:
            played += self.play(params, own, stop)
            rows[: len(own)] = score_rows(golds, played)
        except (Stopped, FeedbackLost) as why:
            failure = why
        hosts.fail_together(failure, FeedbackLost)
        every = hosts.of_each(rows).transpose(1, 0, 2).reshape(-1, len(_COLUMNS))
        return every[: len(self.golds)], [*zip(golds, played, strict=True)]


def score_rows(golds: Sequence[Gold], episodes: Sequence[Episode]) -> np.ndarray:
    """float64 `[questions, 5]`: EM, F1, recall of gold passages, searches, whether it broke.

    An episode that broke has no answer, so its EM and F1 are NaN; its searches count. The recall of
    a question without gold passages is NaN.
    """
    rows = np.full((len(golds), len(_COLUMNS)), np.nan)
    for row, gold, episode in zip(rows, golds, episodes, strict=True):
        names = [each.names for each in episode.searches]
        row[3:] = len(names), isinstance(episode.ended, Broken)
        if gold.relevant:
            row[2] = hops.recall(gold.relevant, names)
        if not isinstance(episode.ended, Broken):
            answer = episode.ended.answer
            row[:2] = answers.score(gold.rule, gold.id, gold.question, answer, gold.answers)
    return rows


def means(rows: np.ndarray) -> dict[str, float]:
    """Means over the questions of `score_rows`, each over those that have such a score.

    `recall` is missing if no question has gold passages; `em` and `f1` are 0 if none was answered.
    """
    found = {}
    for name, column in zip(_COLUMNS, rows.T, strict=True):
        known = column[~np.isnan(column)]
        if len(known) or name != "recall":
            found[name] = float(known.mean()) if len(known) else 0.0
    return found | {"broken_share": found.pop("broken")}

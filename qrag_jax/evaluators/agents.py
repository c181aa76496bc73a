"""Scores of a query encoder by the episodes of an agent, searched greedily."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.rag.episode import Broken
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.feedback.rag import Gold
from qrag_jax.metrics import answers, hops
from qrag_jax.rollouts.agents import Episode
from qrag_jax.runtime.interrupt import StopSignal

BEST_BY = ("f1", "em", "recall")

# (parameters, signal) → an episode for each question, in order.
PlayAll = Callable[[Any, StopSignal], Sequence[Episode]]


@dataclasses.dataclass(frozen=True)
class AgentScores:
    """Scores fixed questions.

    Attributes:
        golds: what is right for each question.
        play: plays all of them once.
        best_by: the score that chooses the best checkpoint.
    """

    golds: Sequence[Gold]
    play: PlayAll
    best_by: str

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the questions.

        Raises:
            Stopped: the run is told to stop.
        """
        scores = scored(self.golds, self.play(params, stop))
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
        )


def scored(golds: Sequence[Gold], episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over the questions.

    An episode that broke has no answer; its searches count. EM and F1 are means over the answered
    questions, `recall` (of gold passages) over those that have gold passages.
    """
    em_f1, recalls, searches, broken = [], [], [], 0
    for gold, episode in zip(golds, episodes, strict=True):
        names = [each.names for each in episode.searches]
        searches.append(len(names))
        if gold.relevant:
            recalls.append(hops.recall(gold.relevant, names))
        if isinstance(episode.ended, Broken):
            broken += 1
            continue
        answer = episode.ended.answer
        em_f1.append(answers.score(gold.rule, gold.id, gold.question, answer, gold.answers))
    means = np.mean(em_f1, axis=0) if em_f1 else (0.0, 0.0)
    scores = {"em": float(means[0]), "f1": float(means[1]), "hops": float(np.mean(searches))}
    if recalls:
        scores["recall"] = float(np.mean(recalls))
    return scores | {"broken_share": broken / len(golds)}

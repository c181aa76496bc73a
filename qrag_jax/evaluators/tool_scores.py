"""Scores of a token policy by its episodes with tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.tools.episode import Failed, ToolTask
from qrag_jax.evaluators.episode_sample import played_sampler
from qrag_jax.evaluators.episode_views import TOKENS
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.feedback.llm import Unscored
from qrag_jax.feedback.rubric import PARTS, OwnRubric, Rubric, reward_of, score
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.interrupt import StopSignal

REWARD = "reward"

# (parameters, signal) → an episode for each question, in order.
PlayAll = Callable[[Any, StopSignal], Sequence[TokenEpisode]]


@dataclasses.dataclass(frozen=True)
class ToolScores:
    """Scores fixed questions.

    Attributes:
        tasks: the questions.
        play: plays all of them once.
        rubric: of the reward.
        best_by: the score that chooses the best checkpoint.
        logged: (places of questions, their episodes) → rows to look at; None: there are none.
    """

    tasks: Sequence[ToolTask]
    play: PlayAll
    rubric: Rubric | OwnRubric
    best_by: str
    logged: Callable[[Sequence[int], Sequence[TokenEpisode]], Sequence[Prediction]] | None = None

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the questions.

        Raises:
            Stopped: the run is told to stop.
        """
        episodes = self.play(params, stop)
        rows = score_rows(self.tasks, episodes, self.rubric)
        scores = means(rows, len(self.tasks))
        failed = f", {share:.0%} failed" if (share := scores["failed_share"]) else ""
        malformed = f", {n:.2f} malformed calls" if (n := scores["malformed"]) else ""
        line = (
            f"step {step}: EM {scores['em']:.3f}, F1 {scores['f1']:.3f}, recall "
            f"{scores['recall']:.3f}, citation {scores['citation']:.3f}, reward "
            f"{scores[REWARD]:.3f}, {scores['turns']:.2f} turns, "
            f"{scores['completed']:.0%} completed{malformed}{failed} on {len(self.tasks)} questions"
        )
        return Evaluation(
            metrics={f"eval/{name}": value for name, value in scores.items()},
            baselines={f"untrained/{name}": value for name, value in scores.items()},
            line=line,
            score=scores[self.best_by],
            scores=scores,
            episodes=played_sampler(TOKENS, self.logged, episodes),
            each=[row[self.best_by] for row in rows],
        )


def score_rows(
    tasks: Sequence[ToolTask], episodes: Sequence[TokenEpisode], rubric: Rubric | OwnRubric
) -> list[dict[str, float]]:
    """Scores of each question whose episode did not fail, nor its reward."""
    rows: list[dict[str, float]] = []
    for task, episode in zip(tasks, episodes, strict=True):
        ended = episode.ended
        if isinstance(ended, Failed):
            continue
        parts, tally = score(ended, task), ended.tally
        reward = reward_of(rubric, ended, task, parts)
        if isinstance(reward, Unscored):
            continue
        rows.append(
            parts
            | {
                REWARD: reward,
                "turns": tally.turns,
                "searches": tally.searches,
                "completed": float(tally.completed),
                "truncated": float(tally.truncated),
                "malformed": tally.malformed + tally.unknown_tool,
                "sampled_tokens": sum(len(t.sampled) for s in episode.segments for t in s),
            }
        )
    return rows


def means(rows: Sequence[Mapping[str, float]], questions: int) -> dict[str, float]:
    """Means of `score_rows`, 0 if there are none; and the share of the questions without a row."""
    names = (*PARTS, REWARD, "turns", "searches", "completed", "truncated", "malformed")
    found = {
        name: float(np.mean([row[name] for row in rows])) if rows else 0.0
        for name in (*names, "sampled_tokens")
    }
    return found | {"failed_share": 1 - len(rows) / questions}

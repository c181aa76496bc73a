"""Scores of a policy by its episodes in an environment that has its own rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.evaluators.episode_sample import played_sampler
from qrag_jax.evaluators.episode_views import TOKENS
from qrag_jax.evaluators.tool_scores import REWARD
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.rollouts.environment_play import PlayedEpisode, Scored
from qrag_jax.runtime.interrupt import StopSignal

# (parameters, signal) → an episode for each task, in order.
PlayAll = Callable[[Any, StopSignal], Sequence[PlayedEpisode]]


@dataclasses.dataclass(frozen=True)
class EnvironmentScores:
    """Scores fixed tasks.

    Attributes:
        play: plays all of them once.
        logged: (places of tasks, their episodes) → rows to look at.
    """

    play: PlayAll
    logged: Callable[[Sequence[int], Sequence[PlayedEpisode]], Sequence[Prediction]]

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the tasks.

        Raises:
            Stopped: the run is told to stop.
        """
        episodes = self.play(params, stop)
        rows = score_rows(episodes)
        scores = means(rows, len(episodes))
        parts = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
        return Evaluation(
            metrics={f"eval/{name}": value for name, value in scores.items()},
            baselines={f"untrained/{name}": value for name, value in scores.items()},
            line=f"step {step}: {parts} on {len(episodes)} tasks",
            score=scores[REWARD],
            scores=scores,
            episodes=played_sampler(TOKENS, self.logged, episodes),
            each=[row[REWARD] for row in rows],
        )


def score_rows(episodes: Sequence[PlayedEpisode]) -> list[dict[str, float]]:
    """The reward, its parts and counts of each episode that has a reward."""
    return [
        {
            REWARD: episode.ended.reward,
            **{name: value for name, value in episode.ended.parts.items() if name != REWARD},
            "turns": float(sum(len(segment) for segment in episode.segments)),
            "truncated": float(episode.ended.truncated),
            "sampled_tokens": float(
                sum(len(turn.sampled) for segment in episode.segments for turn in segment)
            ),
        }
        for episode in episodes
        if isinstance(episode.ended, Scored)
    ]


def means(rows: Sequence[Mapping[str, float]], episodes: int) -> dict[str, float]:
    """Means over the rows, 0 for the reward if there are none; and the share without a row."""
    names = dict.fromkeys((REWARD, *(name for row in rows for name in row)))
    found = {}
    for name in names:
        values = [row[name] for row in rows if name in row]
        found[name] = float(np.mean(values)) if values else 0.0
    return found | {"failed_share": 1 - len(rows) / episodes if episodes else 0.0}

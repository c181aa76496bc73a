"""Scores of a token policy: with tools, or in an environment that has its own rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.episode import Failed, ToolTask
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, sampler
from qrag_jax.feedback.llm import Unscored
from qrag_jax.feedback.rubric import PARTS, OwnRubric, Rubric, reward_of, score
from qrag_jax.metrics.rows import PREDICTIONS, Prediction
from qrag_jax.rollouts.environment_play import Scored
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.interrupt import StopSignal

REWARD = "reward"
_OF_TOOLS = (*PARTS, REWARD, "turns", "searches", "completed", "truncated", "malformed")

# (places of questions, their episodes) → rows to look at.
Logged = Callable[[Sequence[int], Sequence[Any]], Sequence[Prediction]]


@dataclasses.dataclass(frozen=True)
class ToolScores:
    """Scores fixed questions.

    Attributes:
        tasks: the questions.
        play: (parameters, signal) → an episode for each question, in order.
        rubric: of the reward.
        best_by: the score that chooses the best checkpoint.
        logged: makes rows to look at.
    """

    tasks: Sequence[ToolTask]
    play: Callable[[Any, StopSignal], Sequence[TokenEpisode]]
    rubric: Rubric | OwnRubric
    best_by: str
    logged: Logged

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the questions.

        Raises:
            Stopped: the run is told to stop.
        """
        episodes = self.play(params, stop)
        rows = score_rows(self.tasks, episodes, self.rubric)
        scores = means(rows, len(self.tasks), (*_OF_TOOLS, "sampled_tokens"))
        malformed = f", {n:.2f} malformed calls" if (n := scores["malformed"]) else ""
        line = (
            f"step {step}: EM {scores['em']:.3f}, F1 {scores['f1']:.3f}, recall "
            f"{scores['recall']:.3f}, citation {scores['citation']:.3f}, reward "
            f"{scores[REWARD]:.3f}, {scores['turns']:.2f} turns, "
            f"{scores['completed']:.0%} completed{malformed}"
            f"{lost_text(scores, {'failed_share': 'failed'})} on {len(self.tasks)} questions"
        )
        return _evaluation(line, scores, self.best_by, rows, (episodes, self.logged))


@dataclasses.dataclass(frozen=True)
class EnvironmentScores:
    """Scores fixed tasks of an environment that has its own rewards.

    Attributes:
        play: (parameters, signal) → an episode for each task, in order.
        logged: makes rows to look at.
    """

    play: Callable[[Any, StopSignal], Sequence[TokenEpisode]]
    logged: Logged

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the tasks.

        Raises:
            Stopped: the run is told to stop.
        """
        episodes = self.play(params, stop)
        rows = environment_rows(episodes)
        scores = means(rows, len(episodes), (REWARD,))
        parts = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
        line = f"step {step}: {parts} on {len(episodes)} tasks"
        return _evaluation(line, scores, REWARD, rows, (episodes, self.logged))


def _evaluation(
    line: str,
    scores: Mapping[str, float],
    best_by: str,
    rows: Sequence[Mapping[str, float]],
    played: tuple[Sequence[Any], Logged],
) -> Evaluation:
    episodes, logged = played
    return Evaluation.of(
        line,
        scores,
        best_by,
        episodes=sampler(
            PREDICTIONS, lambda at: logged(at, [episodes[n] for n in at]), len(episodes)
        ),
        each=[row[best_by] for row in rows],
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
                "sampled_tokens": _sampled_tokens(episode),
            }
        )
    return rows


def environment_rows(episodes: Sequence[TokenEpisode]) -> list[dict[str, float]]:
    """The reward, its parts and counts of each episode that has a reward."""
    return [
        {
            REWARD: episode.ended.reward,
            **{name: value for name, value in episode.ended.parts.items() if name != REWARD},
            "turns": float(sum(len(segment) for segment in episode.segments)),
            "truncated": float(episode.ended.tally.truncated),
            "sampled_tokens": float(_sampled_tokens(episode)),
        }
        for episode in episodes
        if isinstance(episode.ended, Scored)
    ]


def _sampled_tokens(episode: TokenEpisode) -> int:
    return sum(len(turn.sampled) for segment in episode.segments for turn in segment)


def means(
    rows: Sequence[Mapping[str, float]], episodes: int, names: Sequence[str]
) -> dict[str, float]:
    """Means over the rows, of these names 0 if there are none; and the share without a row."""
    scores = {}
    for name in dict.fromkeys((*names, *(name for row in rows for name in row))):
        values = [row[name] for row in rows if name in row]
        scores[name] = float(np.mean(values)) if values else 0.0
    return scores | {"failed_share": 1 - len(rows) / episodes if episodes else 0.0}

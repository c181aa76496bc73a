"""Scores during training: fact scores from the supporting facts if known, returns from rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.data.sample import Sample
from qrag_jax.evaluators.episode_sample import Sampler, sampler
from qrag_jax.evaluators.episodes import EpisodeEvaluator, mean_scores, means, play_columns
from qrag_jax.feedback.llm import FeedbackLost, Rewards, Unscored
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.metrics.rows import RETRIEVALS, Row
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import Stopped, StopSignal


class Evaluation(NamedTuple):
    """What one evaluation found.

    Attributes:
        metrics: values by the names they are written under.
        baselines: metrics that later evaluations repeat if this one is of the untrained weights.
        line: one line for the screen.
        score: the score that chooses the best checkpoint.
        scores: all scores of multi-step play, kept with the checkpoint if it is the best.
        episodes: gives some of the episodes, on the first host; None: none are kept to look at.
        each: `score` of each question that has one; (): these are not told.
        q_spread: see `runtime.not_learning.Evaluated`.
    """

    metrics: dict[str, float]
    baselines: dict[str, float]
    line: str
    score: float
    scores: dict[str, float]
    episodes: Sampler | None = None
    each: Sequence[float] = ()
    q_spread: float | None = None

    @classmethod
    def of(cls, line: str, scores: Mapping[str, float], best_by: str, **more: Any) -> Evaluation:
        """An evaluation; `more`: further attributes."""
        return cls(
            metrics={f"eval/{name}": value for name, value in scores.items()},
            baselines={f"untrained/{name}": value for name, value in scores.items()},
            line=line,
            score=scores[best_by],
            scores=dict(scores),
            **more,
        )


def lost_text(scores: Mapping[str, float], words: Mapping[str, str]) -> str:
    """Of the shares that are not 0, what they are of, for the line on the screen.

    Args:
        words: name of the share → words for people.
    """
    shares = ((scores.get(name, 0.0), told) for name, told in words.items())
    return "".join(f", {share:.0%} {told}" for share, told in shares if share)


def of_all_hosts(count: int, width: int, ask: Callable[[Sequence[int]], np.ndarray]) -> np.ndarray:
    """float64 `[count, width]`: what is found of all questions, of which each host asks its part.

    It is in the order of the questions, so that a mean does not depend on the number of hosts.

    Args:
        ask: places of questions → their rows; all hosts fail together if one is stopped or has
            lost its feedback.
    """
    index, number = jax.process_index(), jax.process_count()
    places = range(count)[index::number]
    rows = np.full((-(-count // number), width), np.nan)  # as many on each host
    failure: Exception | None = None
    try:
        rows[: len(places)] = ask(places)
    except (Stopped, FeedbackLost) as why:
        failure = why
    hosts.fail_together(failure, FeedbackLost)
    return hosts.of_each(rows).transpose(1, 0, 2).reshape(-1, width)[:count]


def q_spread(rows: Sequence[Row]) -> float | None:
    """The largest difference between two Q-values of a question, over the largest |Q|.

    Args:
        rows: for each question, the chunks of the highest Q at its first step.

    Returns:
        0.0 if all Q are 0; None if no question has two Q-values.
    """
    several = [row.q_values for row in rows if len(row.q_values) > 1]
    if not several:
        return None
    largest = max(abs(q) for values in several for q in values)
    spread = max(max(values) - min(values) for values in several)
    return spread / largest if largest else 0.0


@dataclasses.dataclass(frozen=True)
class TrainingScores:
    """Scores the fixed questions of a training.

    Attributes:
        episodes: plays the questions.
        best_by: name of the score that chooses the best checkpoint.
        gamma: γ, the discount of returns from a language model's rewards.
        max_steps: T, actions per episode.
        stop_action: whether there is a STOP action.
    """

    episodes: EpisodeEvaluator
    best_by: str
    gamma: float
    max_steps: int
    stop_action: bool

    def evaluate(
        self, params: Any, step: int, rewards: Rewards | None, stop: StopSignal
    ) -> Evaluation:
        """Plays the questions and scores the play.

        Args:
            rewards: rewards from a language model; None if the supporting facts give them.
        """
        multi, single = self.episodes.rows(params)
        columns = play_columns(multi)
        scores, single_scores = means(columns), mean_scores(single)
        if rewards is not None:
            columns["return"], broken = self._returns(multi, rewards, stop)
            scores |= {
                "return": float(np.mean(columns["return"])),
                "broken_share": broken / len(multi),
                "unscored_share": 1 - len(columns["return"]) / len(multi),
            }
            single_scores.pop("return", None)  # a language model is not asked about these
        lost = {"broken_share": "without an answer", "unscored_share": "without reward"}
        without = lost_text(scores, lost)
        line = (
            f"step {step}: {_told(scores)}return {scores['return']:.3f}{without} on {len(multi)} "
            "questions"
        )
        found = Evaluation.of(
            line,
            scores,
            self.best_by,
            episodes=sampler(RETRIEVALS, lambda at: [multi[place] for place in at], len(multi)),
            each=columns[self.best_by],
            q_spread=q_spread(single),
        )
        beside = single_scores.items()
        found.metrics.update({f"eval_single_step/{name}": value for name, value in beside})
        found.baselines.update({f"single_step/{name}": value for name, value in beside})
        return found

    def _returns(
        self, rows: Sequence[Row], asks: Rewards, stop: StopSignal
    ) -> tuple[list[float], int]:
        """The returns of the questions that the model scored, in order.

        They are 0 where the model gave no answer; the second value counts these.
        """
        shown, size = self.episodes.shown, self.episodes.batch_size

        def ask(places: Sequence[int]) -> np.ndarray:
            samples = [shown[place] for place in places]
            taken = [self._actions(rows[place], shown[place]) for place in places]
            parts = range(0, len(samples), size)
            asked = [asks.begin(samples[at : at + size], taken[at : at + size]) for at in parts]
            rewards = [each for part in asked for each in asks.wait(part, stop)]
            # Returns, and whether there is no answer.
            found = np.full((len(samples), 2), np.nan)
            for number, episode in enumerate(rewards):
                if not isinstance(episode, Unscored):
                    each = (self.gamma**t * reward for t, reward in enumerate(episode.rewards))
                    found[number] = sum(each), 0
                elif episode.cause not in INFRASTRUCTURE:
                    found[number] = 0, 1
            return found

        found = of_all_hosts(len(rows), 2, ask)
        returns, broken = found[~np.isnan(found[:, 0])].T
        return returns.tolist(), int(broken.sum())

    def _actions(self, row: Row, sample: Sample) -> list[int]:
        """The actions of an episode: the chunks taken, and STOP if that ended the episode."""
        taken = row.pred_idx
        stopped = self.stop_action and len(taken) < self.max_steps
        return [*taken, len(sample.chunks)] if stopped else taken


def _told(scores: Mapping[str, float]) -> str:
    """The scores of what was taken that are there, for the screen."""
    told = ""
    if "fact_em" in scores:
        told += (
            f"fact EM {scores['fact_em']:.3f}, F1 {scores['fact_f1']:.3f}, precision "
            f"{scores['fact_precision']:.3f}, recall {scores['fact_recall']:.3f} (until found, by "
            f"the answer key: F1 {scores['fact_f1_until_found']:.3f}, precision "
            f"{scores['fact_precision_until_found']:.3f}), "
        )
    if "answer_found" in scores:
        told += f"answer found {scores['answer_found']:.3f}, "
    return told

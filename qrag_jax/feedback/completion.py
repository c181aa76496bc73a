"""From the rewards of a model's answers to those of an episode's steps, and where it is complete.

A model is asked once, when an episode is over, or after every step, as Q-RAG's code does it
(`completion_threshold`): every answer gives its step a reward, until one reaches the threshold.
Gold facts play no part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.feedback.language_model import Reward, Unscored


@dataclasses.dataclass(frozen=True)
class EpisodeRewards:
    """rewards: of an episode's steps. kept: steps until it ended."""

    rewards: tuple[float, ...]
    kept: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """When a model is asked about an episode, and what completes it.

    Attributes:
        threshold: None: the model is asked at the end, and the last step has the reward. Else it is
            asked after every step, and the first reward that is not below completes the episode:
            later steps have none.
        ends: a complete episode ends there. Nothing that was played before depends on what came
            after it, so that later steps may as well be cut off when the answers are in.
    """

    threshold: float | None = None
    ends: bool = True

    def parts(self, taken: Sequence[int]) -> list[Sequence[int]]:
        """The chunks that the model is shown in each question about an episode, in order."""
        if self.threshold is None:
            return [taken]
        # An episode without a step is asked about as well: it counts among the batch.
        return [taken[: step + 1] for step in range(max(len(taken), 1))]

    def episodes(
        self, rewards: Sequence[Reward], steps: Sequence[int]
    ) -> list[EpisodeRewards | Unscored]:
        """The steps' rewards of every episode, or why they could not be had.

        Args:
            rewards: of the questions of all episodes, in order. steps: of each episode.
        """
        found, first = [], 0
        for count in steps:
            questions = 1 if self.threshold is None else max(count, 1)
            found.append(self._episode(rewards[first : first + questions], count))
            first += questions
        return found

    def _episode(self, rewards: Sequence[Reward], steps: int) -> EpisodeRewards | Unscored:
        known: list[float] = []
        for reward in rewards:
            if isinstance(reward, Unscored):
                return reward
            known.append(reward)
            if self.threshold is not None and reward >= self.threshold:
                kept = len(known) if self.ends else steps
                return EpisodeRewards((*known, *[0.0] * (steps - len(known)))[:steps], kept)
        # Asked once, the answer is the last step's.
        return EpisodeRewards(tuple([*[0.0] * (steps - len(known)), *known][:steps]), steps)

"""Rewards of an episode's steps from a model's answers, and the step that completes an episode.

A model is asked either once, when an episode is over, or after every step, as in Q-RAG's code
(`completion_threshold`). In the second case every answer gives its step a reward, until one reward
reaches the threshold. Gold facts are not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.feedback.language_model import Reward, Unscored


@dataclasses.dataclass(frozen=True)
class EpisodeRewards:
    """The rewards of one episode.

    Attributes:
        rewards: one per step.
        kept: number of steps until the episode ended.
    """

    rewards: tuple[float, ...]
    kept: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """When a model is asked about an episode, and what completes it.

    Attributes:
        threshold: None: the model is asked at the end, and the last step gets the reward. A number:
            the model is asked after every step, and the first reward that is not below this number
            completes the episode; later steps get no reward.
        ends: whether a complete episode ends there. Earlier steps do not depend on later ones, so
            the later ones can be cut off after the answers have arrived.
    """

    threshold: float | None = None
    ends: bool = True

    def parts(self, taken: Sequence[int]) -> list[Sequence[int]]:
        """The chunks that the model sees in each question about an episode, in the order taken."""
        if self.threshold is None:
            return [taken]
        # The model is also asked about an episode without steps, because it counts in the batch.
        return [taken[: step + 1] for step in range(max(len(taken), 1))]

    def episodes(
        self, rewards: Sequence[Reward], steps: Sequence[int]
    ) -> list[EpisodeRewards | Unscored]:
        """The rewards of each episode's steps, or why it has none.

        Args:
            rewards: of the questions of all episodes, in order.
            steps: number of steps of each episode.
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
        # If the model is asked once, the last step gets the reward.
        return EpisodeRewards(tuple([*[0.0] * (steps - len(known)), *known][:steps]), steps)

"""What is played of an environment that plays itself: tasks in, episodes with rewards out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.rollouts.called_turns import TurnLimits
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED, Segment


@dataclasses.dataclass(frozen=True)
class Scored:
    """An episode that came to an end.

    Attributes:
        reward: by the environment's rubric.
        parts: values of its functions.
        stop: its name for the end.
        truncated: a limit ended it.
        record: what verifiers itself would write of it.
        outside: tokens that the environment had sampled and that are no part of the episode.
    """

    reward: float
    parts: Mapping[str, float]
    stop: str
    truncated: bool
    record: Mapping[str, Any]
    outside: int = 0


@dataclasses.dataclass(frozen=True)
class Lost:
    """An episode that has no reward.

    Attributes:
        cause: a short word, such as those of `llm.outcomes` and `feedback.language_model`.
        message: one sentence.
    """

    cause: str
    message: str


class Unit(NamedTuple):
    """Episodes of one task that are played together, since their rewards may compare them.

    Attributes:
        split: "train" or "eval".
        task: its number.
        keys: uint32 `[2]`, of the draws of each episode.
    """

    split: str
    task: int
    keys: tuple[np.ndarray, ...]


class PlayedEpisode(NamedTuple):
    """A played episode.

    Attributes:
        ended: how it ended.
        segments: what was sampled and observed.
        attempts: how often it was played.
        seconds: from its begin to its reward.
    """

    ended: Scored | Lost
    segments: tuple[Segment, ...]
    attempts: int
    seconds: float

    @property
    def status(self) -> str:
        """As `TokenTrajectory.status`."""
        if isinstance(self.ended, Lost):
            return self.ended.cause
        return TRUNCATED if self.ended.truncated else DONE


class PlayedUnit(NamedTuple):
    """The episodes of a unit."""

    episodes: tuple[PlayedEpisode, ...]

    @property
    def ended(self) -> Scored | Lost:
        """The first failure; if there is none, the end of the first episode."""
        ends = [episode.ended for episode in self.episodes]
        return next((end for end in ends if isinstance(end, Lost)), ends[0])


@dataclasses.dataclass
class PlayCounts:
    """What the episodes needed.

    Attributes:
        turns: that were sampled.
        batches: calls of the sampler; one for each turn where it is a server.
        failed: episodes that failed, attempts that were repeated among them.
        outside: sampled tokens that are no part of an episode.
        lost: processes that were lost.
    """

    turns: int = 0
    batches: int = 0
    failed: int = 0
    outside: int = 0
    lost: int = 0


@dataclasses.dataclass(frozen=True)
class PlaySettings:
    """How environments are played.

    Attributes:
        limits: of an episode.
        seconds: that an environment may work on an episode by itself.
        attempts: a unit that fails is played again, so often in all.
        side_by_side: episodes that are played at a time.
        served: where the process finds the server of turns, and its settings.
    """

    limits: TurnLimits
    seconds: float
    attempts: int
    side_by_side: int
    served: Mapping[str, Any] = dataclasses.field(default_factory=dict)

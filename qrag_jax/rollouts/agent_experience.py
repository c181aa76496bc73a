"""Experience of agents: every batch of questions is played on the host, then learned from.

A batch in which the run is stopped, or killed, was not learned from: the resumed run plays it from
its beginning, with the same draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from jax.sharding import Mesh

from qrag_jax.rollouts.hop_batch import HopBatch
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import shard_batch

# (state, numbers of the questions, number of the step, signal) → this host's episodes.
PlayBatch = Callable[[Any, Sequence[int], int, StopSignal], HopBatch]


class Drawn(NamedTuple):
    """The questions of one batch.

    numbers: of the questions on this host.
    epochs: how often each was drawn before.
    """

    numbers: np.ndarray
    epochs: np.ndarray


class QuestionOrder:
    """An endless shuffled order of questions, each once an epoch.

    Args:
        questions: their number.
        batch: questions of one batch on all hosts.
        seed: of the shuffling.
        shard: (index of this host, number of hosts).
    """

    def __init__(
        self, questions: int, batch: int, seed: int, shard: tuple[int, int] = (0, 1)
    ) -> None:
        self._order = grain.MapDataset.range(questions).seed(seed).shuffle().repeat()
        self._questions, self._batch = questions, batch
        index, hosts = shard
        self._own = range(index * batch // hosts, (index + 1) * batch // hosts)

    def at(self, step: int) -> Drawn:
        """The questions of the batch that step `step` learns from, from 0."""
        places = [step * self._batch + place for place in self._own]
        numbers = np.array([self._order[place] for place in places], np.int32)
        return Drawn(numbers, np.array(places, np.int32) // self._questions)


class AgentExperience:
    """See `rollouts.experience.Experience`: the host plays each batch by the newest weights.

    Args:
        play: plays a batch.
        counts: further metrics, since this start of the run.
        batches: number of batches learned from before.
    """

    def __init__(
        self,
        mesh: Mesh,
        order: QuestionOrder,
        play: PlayBatch,
        counts: Callable[[], dict[str, float]],
        batches: int = 0,
    ) -> None:
        self.waited = {"play": 0.0}
        self.samples = np.zeros((0, 2), np.int32)
        self._mesh, self._order, self._play, self._counts = mesh, order, play, counts
        self._batches = batches

    def next(self, state: Any, number: int, stop: StopSignal) -> HopBatch:
        """See `Experience`.

        Raises:
            Stopped: the run is told to stop; nothing of the batch is learned from.
        """
        stop.check()
        numbers, epochs = self._order.at(self._batches)
        before = time.monotonic()
        played = self._play(state, numbers.tolist(), number, stop)
        self.waited["play"] += time.monotonic() - before
        self._batches += 1
        self.samples = np.stack([numbers, epochs], axis=1)
        return shard_batch(self._mesh, played)

    def prepare(self, state: Any) -> None:
        """See `Experience`; there is nothing to prepare."""

    def position(self) -> tuple[Any, list[Any]]:
        """See `Experience`: the number of batches learned from."""
        return self._batches, []

    def counts(self) -> dict[str, float]:
        """See `Experience`."""
        return self._counts()

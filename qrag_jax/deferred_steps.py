"""Training steps with rewards from a language model, which answers while the device goes on.

The batch of step s is played by the weights after s - K updates (or the first ones) and learned
from in step s, however long its answers take: a run's numbers do not depend on speed. What is in
flight is saved as actions, and asked again by a run that goes on.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.data.lazy_samples import drawn
from qrag_jax.data.sample import Sample
from qrag_jax.feedback.language_model import Unscored
from qrag_jax.feedback.service import Asked, Rewards
from qrag_jax.learners.deferred import Played, PlayStep, ScoredEpisodes
from qrag_jax.learners.pqn import TrainState
from qrag_jax.learners.step import Metrics, TrainStep
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import replicate, shard_batch
from qrag_jax.steps import Batches, is_done


@dataclasses.dataclass
class _InFlight:
    """A batch between its play and its update."""

    batch: EpisodeBatch
    samples: np.ndarray  # [b, 2] on this host: number and epoch
    behind: Any  # the iterator's position
    played: Played
    asked: Asked | None = None  # for its rewards; None: not yet


class DeferredSteps:
    """See `steps.Steps`."""

    def __init__(
        self,
        mesh: Mesh,
        play: PlayStep,
        learn: TrainStep,
        batches: Batches,
        samples: Sequence[Sample],
        rewards: Rewards,
        staleness: int,
        steps: int,
    ) -> None:
        """
        Args:
            samples: what the batches' numbers mean.
            staleness: K. steps: of the whole run; nothing is played beyond.
        """
        self.waited = {"input": 0.0, "feedback": 0.0}
        self.samples = np.zeros((0, 2), np.int32)
        self._mesh, self._play, self._learn = mesh, play, learn
        self._batches, self._samples, self._rewards = batches, samples, rewards
        self._staleness, self._steps = staleness, steps
        self._used: Any = batches.position
        self._queue: deque[_InFlight] = deque()
        self._running: Metrics | None = None  # of the last update

    def begin(self, pending: list[Any]) -> None:
        """See `Steps`."""
        for fields in pending:
            batch, samples = self._batches.next()
            first = jax.process_index() * len(samples)
            own = {name: rows[first : first + len(samples)] for name, rows in fields.items()}
            arrays = (
                np.asarray(own["actions"], np.int32),
                np.asarray(own["valid"], bool),
                np.asarray(own["entropy"], np.float32),
            )
            played = Played(*shard_batch(self._mesh, arrays))
            self._queue.append(_InFlight(batch, samples, self._batches.position, played))
        self._ask()

    def step(
        self, state: TrainState, number: int, stop: StopSignal
    ) -> tuple[TrainState, Metrics] | None:
        """See `Steps`."""
        while (ahead := len(self._queue)) <= self._staleness and number + ahead < self._steps:
            self._queue.append(self._next(state, number + ahead))
        oldest = self._queue[0]
        if oldest.asked is None or not oldest.asked.ready():
            # What was just played is asked for before anything is waited for.
            self._ask()
        assert oldest.asked is not None
        before = time.monotonic()
        rewards = self._rewards.wait(oldest.asked, stop)
        self.waited["feedback"] += time.monotonic() - before
        if rewards is None:
            return None
        shape = len(rewards), oldest.played.actions.shape[1]
        score, scored = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for row, episode in enumerate(rewards):
            if not isinstance(episode, Unscored):
                score[row, : len(episode.rewards)] = episode.rewards
                scored[row, : episode.kept] = True
        scores = shard_batch(self._mesh, (score, scored))
        with jax.transfer_guard("disallow"):
            state, metrics = self._learn(
                state, ScoredEpisodes(oldest.batch, oldest.played, *scores)
            )
        self._queue.popleft()
        self._used, self._running, self.samples = oldest.behind, metrics, oldest.samples
        self._ask()
        return state, metrics

    def position(self) -> tuple[Any, list[Any]]:
        """See `Steps`; every host must call it."""
        return self._used, [
            {
                name: array.tolist()
                for name, array in zip(Played._fields, map(_of_all_hosts, entry.played))
            }
            for entry in self._queue
        ]

    def counts(self) -> dict[str, float]:
        """See `Steps`."""
        return self._rewards.counts()

    def _next(self, state: TrainState, number: int) -> _InFlight:
        """Begins to play the batch that step `number` learns from."""
        before = time.monotonic()
        batch, samples = self._batches.next()
        if self._running is None or is_done(self._running):
            self.waited["input"] += time.monotonic() - before
        on_device = replicate(self._mesh, np.int32(number))
        with jax.transfer_guard("disallow"):
            played = self._play(state, batch, on_device)
        return _InFlight(batch, samples, self._batches.position, played)

    def _ask(self) -> None:
        """Asks for the rewards of what was played; waits for the play, for nothing else."""
        for entry in self._queue:
            if entry.asked is None:
                actions, valid = map(_of_this_host, entry.played[:2])
                taken = [row[row_valid].tolist() for row, row_valid in zip(actions, valid)]
                samples = [drawn(self._samples, *which) for which in entry.samples.tolist()]
                entry.asked = self._rewards.begin(samples, taken)


def _of_this_host(array: jax.Array) -> np.ndarray:
    """This host's rows of an array that is split by rows."""
    parts = sorted(array.addressable_shards, key=lambda part: part.index[0].start or 0)
    return np.concatenate([np.asarray(part.data) for part in parts])


def _of_all_hosts(array: jax.Array) -> np.ndarray:
    if jax.process_count() == 1:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))

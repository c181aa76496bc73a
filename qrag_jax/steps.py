"""How a training step comes about: from the next batch to the new state, in one program or two."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.learners.pqn import TrainState
from qrag_jax.learners.step import Metrics, TrainStep
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import shard_batch


class Steps(Protocol):
    """What the training loop steps with.

    Attributes:
        waited: seconds so far in which the device may have had nothing to do, by what for.
        samples: number and epoch of those that the last step learned from, `[b, 2]` on this host.
    """

    waited: dict[str, float]
    samples: np.ndarray

    def begin(self, pending: list[Any]) -> None:
        """Before the first step; `pending` as `position` gave it, empty for a new run."""
        ...

    def step(
        self, state: TrainState, number: int, stop: StopSignal
    ) -> tuple[TrainState, Metrics] | None:
        """The step from `number` to `number` + 1, which the device may still be computing; None if
        the run is to stop and the step did not come about."""
        ...

    def position(self) -> tuple[Any, list[Any]]:
        """What a run goes on from: the iterator's position behind the batches learned from, and
        what is known of those after it, as JSON."""
        ...

    def counts(self) -> dict[str, float]:
        """Further metrics, over the whole start."""
        ...


class Batches:
    """The batches of an iterator, on the mesh."""

    def __init__(self, mesh: Mesh, batches: Any) -> None:
        self._mesh, self._batches = mesh, batches
        self.position: Any = batches.get_state()  # of the iterator, behind the last one

    def next(self) -> tuple[EpisodeBatch, np.ndarray]:
        """The next batch, and number and epoch of each sample on this host, `[b, 2]`."""
        batch = next(self._batches)
        self.position = self._batches.get_state()
        return shard_batch(self._mesh, batch), np.stack([batch.sample, batch.epoch], axis=1)


def is_done(metrics: Metrics) -> bool:
    """Whether the device has computed them."""
    return metrics["loss"].is_ready()  # type: ignore[attr-defined]


class FusedSteps:
    """Rollout, rewards and update in one program, one batch fetched ahead."""

    def __init__(self, program: TrainStep, batches: Batches) -> None:
        self.waited = {"input": 0.0}
        self._program, self._batches = program, batches
        self.samples = np.zeros((0, 2), np.int32)
        self._used: Any = batches.position
        self._ahead: tuple[EpisodeBatch, np.ndarray, Any] | None = None

    def begin(self, pending: list[Any]) -> None:
        """See `Steps`."""
        if pending:
            raise ValueError("episodes of a run with another reward are pending")
        self._ahead = self._fetch(lambda: True)

    def step(
        self, state: TrainState, number: int, stop: StopSignal
    ) -> tuple[TrainState, Metrics] | None:
        """See `Steps`."""
        assert self._ahead is not None
        batch, self.samples, self._used = self._ahead
        with jax.transfer_guard("disallow"):
            state, metrics = self._program(state, batch)
        self._ahead = self._fetch(lambda: is_done(metrics))
        return state, metrics

    def position(self) -> tuple[Any, list[Any]]:
        """See `Steps`; the batch fetched ahead is fetched again."""
        return self._used, []

    def counts(self) -> dict[str, float]:
        """See `Steps`."""
        return {}

    def _fetch(self, idle: Callable[[], bool]) -> tuple[EpisodeBatch, np.ndarray, Any]:
        before = time.monotonic()
        batch, samples = self._batches.next()
        # Grain's threads or processes build batches ahead, so this takes a moment, in which the
        # device has work; it was kept waiting only if that is done by now.
        if idle():
            self.waited["input"] += time.monotonic() - before
        return batch, samples, self._batches.position

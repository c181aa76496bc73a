"""Experience of agents: the host plays batches of questions, some updates before they are used.

The batch of step s is played by the weights after s - K updates (at first, by the first weights).
With K = 0 the device waits for it. Otherwise a thread plays it while the device goes on, and a
run's numbers still do not depend on speed.

A checkpoint waits for the batches in flight and holds what was done in them, so that a run that is
killed goes on bit for bit. A run that is told to stop does not wait: batches in flight are played
anew when it goes on, by the weights of then. No question is left out or learned from twice.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import grain
import numpy as np

from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import Stopped, StopSignal

_LOOK_EVERY = 0.1  # seconds between looks for a signal to stop


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
        first: the questions of the first epoch, in their order; None: shuffled, too.
    """

    def __init__(
        self,
        questions: int,
        batch: int,
        seed: int,
        shard: tuple[int, int] = (0, 1),
        *,
        first: Sequence[int] | None = None,
    ) -> None:
        self._order = grain.MapDataset.range(questions).seed(seed).shuffle().repeat()
        self._first = first or ()
        self._questions, self._batch = questions, batch
        index, hosts = shard
        self._own = range(index * batch // hosts, (index + 1) * batch // hosts)

    def at(self, step: int) -> Drawn:
        """The questions of the batch that step `step` learns from, from 0."""
        places = [step * self._batch + place for place in self._own]
        numbers = [
            self._first[place] if place < len(self._first) else self._order[place]
            for place in places
        ]
        return Drawn(np.array(numbers, np.int32), np.array(places, np.int32) // self._questions)


@dataclasses.dataclass(frozen=True)
class Playing:
    """How batches are played.

    Attributes:
        play: (parameters, numbers of the questions, number of the step, signal) → this host's
            episodes.
        batch: (episodes, number of the step) → what its update takes.
        save, restore: an episode to JSON values and back, to the last bit.
        params: what `play` needs of the training state. With K > 0 it is a copy, which an update
            does not overwrite.
        staleness: K, updates between the play of a batch and its own update.
        steps: optimizer steps of the whole run; no batch is played for later ones.
    """

    play: Callable[[Any, Sequence[int], int, StopSignal], list[Any]]
    batch: Callable[[Sequence[Any], int], Any]
    save: Callable[[Any], Any]
    restore: Callable[[Any], Any]
    params: Callable[[Any], Any]
    staleness: int
    steps: int


class AgentExperience:
    """See `rollouts.experience.Experience`.

    Args:
        counts: further metrics, since this start of the run.
        batches: number of batches learned from before.
        pending: the played batches that `position` gave; empty for a new run.
    """

    def __init__(
        self,
        order: QuestionOrder,
        playing: Playing,
        counts: Callable[[], dict[str, float]],
        batches: int = 0,
        *,
        pending: Sequence[Any] = (),
    ) -> None:
        self.waited = {"play": 0.0}
        self.samples = np.zeros((0, 2), np.int32)
        self._order, self._playing, self._counts = order, playing, counts
        self._batches = batches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="play")
        self._flying: deque[Future[list[Any]]] = deque()
        for episodes in pending:
            played: Future[list[Any]] = Future()
            played.set_result([playing.restore(each) for each in episodes])
            self._flying.append(played)

    def next(self, state: Any, number: int, stop: StopSignal) -> Any:
        """See `Experience`.

        Raises:
            Stopped: the run is told to stop, on this host or another; nothing of the batch is
                learned from.
            FeedbackLost: the language model of a host is gone.
        """
        numbers, epochs = self._order.at(self._batches)
        before, failure, episodes = time.monotonic(), None, list[Any]()
        try:
            episodes = self._played(state, number, stop)
        except (Stopped, FeedbackLost) as why:
            failure = why
        finally:
            self.waited["play"] += time.monotonic() - before
        hosts.fail_together(failure, FeedbackLost)
        self._batches += 1
        self.samples = np.stack([numbers, epochs], axis=1)
        return self._playing.batch(episodes, number)

    def prepare(self, state: Any) -> None:
        """See `Experience`; there is nothing to prepare."""

    def position(self) -> tuple[Any, list[Any]]:
        """See `Experience`: the number of batches learned from, and those played since.

        It waits for the batches in flight. Those that were stopped are left out.
        """
        before, pending = time.monotonic(), []
        for played in self._flying:
            try:
                pending.append([self._playing.save(each) for each in played.result()])
            except (Stopped, FeedbackLost):
                break
        self.waited["play"] += time.monotonic() - before
        return self._batches, pending

    def counts(self) -> dict[str, float]:
        """See `Experience`."""
        return self._counts()

    def _played(self, state: Any, number: int, stop: StopSignal) -> list[Any]:
        """The episodes that step `number` learns from; begins to play those of later steps."""
        stop.check()
        playing = self._playing
        if not playing.staleness:
            own = self._order.at(self._batches).numbers.tolist()
            return playing.play(playing.params(state), own, number, stop)
        last = min(number + playing.staleness, playing.steps - 1)
        if number + len(self._flying) <= last:
            params = playing.params(state)
            while (step := number + len(self._flying)) <= last:
                own = self._order.at(self._batches + step - number).numbers.tolist()
                self._flying.append(self._thread.submit(playing.play, params, own, step, stop))
        while not concurrent.futures.wait([self._flying[0]], _LOOK_EVERY).done:
            stop.check()
        episodes = self._flying[0].result()
        self._flying.popleft()
        return episodes

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import grain
import numpy as np
from jax.sharding import Mesh

from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.rollouts.hop_batch import HopBatch, Rewarded
from qrag_jax.rollouts.pool_search import Drawn as Search
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.mesh import shard_batch

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


@dataclasses.dataclass(frozen=True)
class Playing:
    """How batches are played.

    Attributes:
        play: (parameters, numbers of the questions, number of the step, signal) → this host's
            episodes.
        batch: makes the arrays of episodes.
        vectors: float32 `[n, D]` of passages by their numbers.
        params: what `play` needs of the training state. With K > 0 it is a copy, which an update
            does not overwrite.
        staleness: K, updates between the play of a batch and its own update.
        steps: optimizer steps of the whole run; no batch is played for later ones.
    """

    play: Callable[[Any, Sequence[int], int, StopSignal], list[Rewarded]]
    batch: Callable[[Sequence[Rewarded]], HopBatch]
    vectors: Callable[[np.ndarray], np.ndarray]
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
        mesh: Mesh,
        order: QuestionOrder,
        playing: Playing,
        counts: Callable[[], dict[str, float]],
        batches: int = 0,
        *,
        pending: Sequence[Any] = (),
    ) -> None:
        self.waited = {"play": 0.0}
        self.samples = np.zeros((0, 2), np.int32)
        self._mesh, self._order, self._playing, self._counts = mesh, order, playing, counts
        self._batches = batches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="play")
        self._flying: deque[Future[list[Rewarded]]] = deque()
        for episodes in pending:
            played: Future[list[Rewarded]] = Future()
            played.set_result([_restored(each, playing.vectors) for each in episodes])
            self._flying.append(played)

    def next(self, state: Any, number: int, stop: StopSignal) -> HopBatch:
        """See `Experience`.

        Raises:
            Stopped: the run is told to stop; nothing of the batch is learned from.
        """
        stop.check()
        numbers, epochs = self._order.at(self._batches)
        before = time.monotonic()
        try:
            episodes = self._played(state, number, stop)
        finally:
            self.waited["play"] += time.monotonic() - before
        self._batches += 1
        self.samples = np.stack([numbers, epochs], axis=1)
        return shard_batch(self._mesh, self._playing.batch(episodes))

    def prepare(self, state: Any) -> None:
        """See `Experience`; there is nothing to prepare."""

    def position(self) -> tuple[Any, list[Any]]:
        """See `Experience`: the number of batches learned from, and those played since.

        It waits for the batches in flight. Those that were stopped are left out.
        """
        before, pending = time.monotonic(), []
        for played in self._flying:
            try:
                pending.append([_saved(each) for each in played.result()])
            except (Stopped, FeedbackLost):
                break
        self.waited["play"] += time.monotonic() - before
        return self._batches, pending

    def counts(self) -> dict[str, float]:
        """See `Experience`."""
        return self._counts()

    def _played(self, state: Any, number: int, stop: StopSignal) -> list[Rewarded]:
        """The episodes that step `number` learns from; begins to play those of later steps."""
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


def _saved(episode: Rewarded) -> dict[str, Any]:
    """What was done in an episode and its rewards, as JSON."""
    return {
        "searches": [
            {
                "row": each.row.tolist(),
                "pool": each.pool.tolist(),
                "actions": each.actions.tolist(),
                "log_prob": each.log_prob,
            }
            for each in episode.searches
        ],
        "episode": None if episode.episode is None else [*map(float, episode.episode)],
        "hops": [[*map(float, rewards)] for rewards in episode.hops],
    }


def _restored(saved: Mapping[str, Any], vectors: Callable[[np.ndarray], np.ndarray]) -> Rewarded:
    searches = []
    for each in saved["searches"]:
        pool = np.array(each["pool"], np.int64)
        present = pool != NONE
        known = vectors(pool[present])
        found = np.zeros((len(pool), known.shape[1]), np.float32)
        found[present] = known
        row, actions = np.array(each["row"], np.int32), np.array(each["actions"], np.int32)
        searches.append(Search(row, pool, found, actions, each["log_prob"], 0.0, (), False))
    return Rewarded(searches, saved["episode"], saved["hops"])

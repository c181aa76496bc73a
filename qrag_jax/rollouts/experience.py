"""Experience: where the batches that training learns from come from.

- `Batches`: a batch of questions; the update itself plays and scores it.
- `Deferred`: episodes that the device played K updates ago. A language model gives their rewards
  while the device goes on.
- `AgentExperience`: episodes that the host plays, in a thread if K > 0.

The batch of step s is played by the weights after s - K updates (at first, by the first weights)
and learned from in step s, however long it takes: a run's numbers do not depend on speed. What is
in flight is saved, so that a run that is killed goes on bit for bit: of `Deferred` as actions, for
whose rewards a resumed run asks again.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.data.sample import Sample, drawn
from qrag_jax.errors import FeedbackLost
from qrag_jax.feedback.rewards import Asked, Rewards
from qrag_jax.llm.outcomes import Failure
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import Stopped, StopSignal, wait_for
from qrag_jax.runtime.mesh import replicate, shard_batch


class Played(NamedTuple):
    """What is kept of played episodes; T steps."""

    actions: jax.Array  # `[B, T]`, chunks in the order taken, or STOP
    valid: jax.Array  # `[B, T]`, whether the step happened
    entropy: jax.Array  # `[B, T]`, of the acting policy, in nats


class ScoredEpisodes(NamedTuple):
    batch: EpisodeBatch  # the questions
    played: Played
    score: jax.Array  # `[B, T]` float32, reward of each step
    # `[B, T]` bool, whether the step is learned from. It is False in an episode without rewards,
    # and after the step at which the rewards ended an episode. The last step that is learned from
    # counts as the episode's end.
    scored: jax.Array


class Experience(Protocol):
    """What the training loop learns from; the kinds of it inherit the defaults."""

    # Seconds so far in which the device may have been idle, by cause
    waited: dict[str, float]
    # `[b, 2]` on this host, number and epoch of each sample of the last `next`
    samples: np.ndarray = np.zeros((0, 2), np.int32)

    def next(self, state: Any, number: int, stop: StopSignal) -> Any:
        """What the step from `number` to `number` + 1 learns from.

        The device may still be computing `state`. Raises `FeedbackLost` if the language model gives
        no more rewards, on any host.
        """
        ...

    def prepare(self, state: Any) -> None:
        """Does the host's work for the next step while the device computes `state`."""
        return

    def position(self) -> tuple[Any, list[Any]]:
        """Where a resumed run goes on, as JSON; all hosts call it together.

        That is the position after the batches learned from, and the episodes played since.
        """
        ...

    def counts(self) -> dict[str, float]:
        """Further metrics, counted since this start of the run."""
        return {}


class Batches(Experience):
    """The batches of an iterator; the update plays and scores them."""

    def __init__(self, mesh: Mesh, batches: Any) -> None:
        self.waited = {"input": 0.0}
        self._mesh, self._batches = mesh, batches
        self._used: Any = batches.get_state()

    def next(self, state: Any, number: int, stop: StopSignal) -> EpisodeBatch:
        stop.check()
        batch, self.samples, self._used = self.fetch(state)  # while the device computes `state`
        return batch

    def position(self) -> tuple[Any, list[Any]]:
        return self._used, []

    def fetch(self, state: Any = None) -> tuple[EpisodeBatch, np.ndarray, Any]:
        """The next batch, on the mesh; `samples` of it; the iterator's position after it."""
        # Grain's threads or processes build batches ahead, so this is short, and the device has
        # work meanwhile. It had to wait only if that work, `state`, is done by now.
        before = time.monotonic()
        batch = next(self._batches)
        position = self._batches.get_state()
        placed, samples = shard_batch(self._mesh, batch), np.stack([batch.sample, batch.epoch], 1)
        # Of one program all arrays are there at once; those on the host count as computed.
        if all(leaf.is_ready() for leaf in jax.tree.leaves(state)[:1] if hasattr(leaf, "is_ready")):
            self.waited["input"] += time.monotonic() - before
        return placed, samples, position


@dataclasses.dataclass
class _InFlight:
    """A batch between its play and its update."""

    batch: EpisodeBatch
    samples: np.ndarray  # [b, 2] on this host: number and epoch
    behind: Any  # the iterator's position after this batch
    played: Played
    asked: Asked | None = None  # the request for its rewards; None: not sent yet


class Deferred(Experience):
    """Batches that are played K updates before they are learned from.

    Args:
        play: `(state, batch, number of the batch)` → `Played`, a compiled program.
        samples: the training samples, indexed by the numbers in batches.
        staleness: K.
        steps: optimizer steps of the whole run; no batch is played for later ones.
        pending: the played episodes that `position` gave; empty for a new run.
    """

    def __init__(
        self,
        mesh: Mesh,
        play: Callable[..., Played],
        batches: Batches,
        rewards: Rewards,
        samples: Sequence[Sample],
        *,
        staleness: int,
        steps: int,
        pending: Sequence[Any] = (),
    ) -> None:
        self.waited = batches.waited
        self.waited["feedback"] = 0.0
        self._mesh, self._play, self._batches, self._rewards = mesh, play, batches, rewards
        self._all, self._staleness, self._steps = samples, staleness, steps
        self._used, _ = batches.position()
        self._queue: deque[_InFlight] = deque()
        for fields in pending:
            batch, here, behind = self._batches.fetch()
            first, kinds = jax.process_index() * len(here), (np.int32, bool, np.float32)
            part = (fields[name][first : first + len(here)] for name in Played._fields)
            arrays = tuple(np.asarray(rows, kind) for rows, kind in zip(part, kinds, strict=True))
            played = Played(*shard_batch(self._mesh, arrays))
            self._queue.append(_InFlight(batch, here, behind, played))
        self._ask()

    def next(self, state: Any, number: int, stop: StopSignal) -> ScoredEpisodes:
        stop.check()
        while (ahead := len(self._queue)) <= self._staleness and number + ahead < self._steps:
            self._queue.append(self._begin(state, number + ahead))
        oldest = self._queue[0]
        if oldest.asked is None or not oldest.asked.ready():
            # Ask for the rewards of what was just played before waiting for the oldest batch.
            self._ask()
        assert oldest.asked is not None
        asked, before = oldest.asked, time.monotonic()
        rewards = hosts.all_or_none(lambda: self._rewards.wait(asked, stop))
        self.waited["feedback"] += time.monotonic() - before
        shape = len(rewards), oldest.played.actions.shape[1]
        score, scored = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for row, episode in enumerate(rewards):
            if not isinstance(episode, Failure):
                score[row, : len(episode.rewards)] = episode.rewards
                scored[row, : episode.kept] = True
        scores = shard_batch(self._mesh, (score, scored))
        self._queue.popleft()
        self._used, self.samples = oldest.behind, oldest.samples
        return ScoredEpisodes(oldest.batch, oldest.played, *scores)

    def prepare(self, state: Any) -> None:
        self._ask()

    def position(self) -> tuple[Any, list[Any]]:
        return self._used, [
            {name: hosts.of_all(array).tolist() for name, array in entry.played._asdict().items()}
            for entry in self._queue
        ]

    def counts(self) -> dict[str, float]:
        return self._rewards.counts()

    def _begin(self, state: Any, number: int) -> _InFlight:
        """Starts to play the batch that step `number` learns from."""
        batch, samples, behind = self._batches.fetch(state)
        on_device = replicate(self._mesh, np.int32(number))
        with jax.transfer_guard("disallow"):
            played = self._play(state, batch, on_device)
        return _InFlight(batch, samples, behind, played)

    def _ask(self) -> None:
        """Asks for the rewards of the played batches; waits for their play, but for no answers."""
        for entry in self._queue:
            if entry.asked is None:
                actions, valid = map(hosts.rows_here, entry.played[:2])
                taken = [row[row_valid].tolist() for row, row_valid in zip(actions, valid)]
                samples = [drawn(self._all, *which) for which in entry.samples.tolist()]
                entry.asked = self._rewards.begin(samples, taken)


class Staged(Experience):
    """One experience after another.

    Args:
        stages: the first step of each stage, and what makes its experience; its argument says
            whether the stage goes on where the run's progress ends.
        step: of the run.
    """

    def __init__(
        self, stages: Sequence[tuple[int, Callable[[bool], Experience]]], step: int
    ) -> None:
        current = max(place for place, (first, _) in enumerate(stages) if first <= step)
        first, make = stages[current]
        self._later = deque(stages[current + 1 :])
        # The progress of a run that stands between two stages is that of the one before.
        self._now = make(step > first or first == 0)
        self.waited = self._now.waited

    def next(self, state: Any, number: int, stop: StopSignal) -> Any:
        if self._later and self._later[0][0] == number:
            _, make = self._later.popleft()
            self._now = make(False)
            before, self.waited = self.waited, self._now.waited
            for name, seconds in before.items():
                self.waited[name] = self.waited.get(name, 0.0) + seconds
        batch = self._now.next(state, number, stop)
        self.samples = self._now.samples
        return batch

    def prepare(self, state: Any) -> None:
        self._now.prepare(state)

    def position(self) -> tuple[Any, list[Any]]:
        return self._now.position()

    def counts(self) -> dict[str, float]:
        return self._now.counts()


# ---------------------------------------------------------------- episodes that the host plays
# A checkpoint waits for the batches in flight. A run that is asked to stop does not: they are
# played again when it goes on, by the weights of then. No question is left out or learned from
# twice.


def questions_at(
    step: int,
    questions: int,
    batch: int,
    seed: int,
    shard: tuple[int, int] = (0, 1),
    *,
    first: Sequence[int] | None = None,
) -> np.ndarray:
    """The samples of the batch that step `step` learns from: number and epoch, int32 `[b, 2]`.

    The order is endless and shuffled, each question once an epoch. Steps count from 0.

    Args:
        batch: questions of one batch on all hosts; those of this host are returned.
        shard: (index of this host, number of hosts).
        first: the questions of the first epoch, in their order; None: shuffled, too.
    """
    order = grain.MapDataset.range(questions).seed(seed).shuffle().repeat()
    (index, count), first = shard, first or ()
    places_here = range(index * batch // count, (index + 1) * batch // count)
    places = step * batch + np.array(places_here, np.int64)
    numbers = [first[place] if place < len(first) else order[int(place)] for place in places]
    # How often each was drawn before.
    return np.stack([numbers, places // questions], axis=1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Playing:
    """How batches are played."""

    # (parameters, numbers of the questions, number of the step, signal) → this host's episodes
    play: Callable[[Any, Sequence[int], int, StopSignal], list[Any]]
    batch: Callable[[Sequence[Any], int], Any]  # (episodes, number of the step) → for its update
    save: Callable[[Any], Any]  # an episode to JSON values; `restore` reads them, to the last bit
    restore: Callable[[Any], Any]
    # What `play` needs of the state. With K > 0 it is a copy, which an update does not overwrite
    params: Callable[[Any], Any]
    staleness: int  # K, updates between the play of a batch and its own update
    steps: int  # optimizer steps of the whole run; no batch is played for later ones
    # (state, number of the step, signal): makes what the questions of this step depend on
    prepare: Callable[[Any, int, StopSignal], None] = lambda *_: None


class AgentExperience(Experience):
    """Batches of episodes that the host plays.

    Args:
        order: what is played for the batch that step s learns from, as `questions_at` gives it;
            what is no question itself has the question that it is of before its epoch.
        counts: further metrics, since this start of the run.
        batches: number of batches learned from before.
        pending: the played batches that `position` gave; empty for a new run.
    """

    def __init__(
        self,
        order: Callable[[int], np.ndarray],
        playing: Playing,
        counts: Callable[[], dict[str, float]],
        batches: int = 0,
        *,
        pending: Sequence[Any] = (),
    ) -> None:
        self.waited = {"play": 0.0}
        self._order, self._playing, self._counts = order, playing, counts
        self._batches = batches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="play")
        self._flying: deque[Future[list[Any]]] = deque()
        for episodes in pending:
            played: Future[list[Any]] = Future()
            played.set_result([playing.restore(episode) for episode in episodes])
            self._flying.append(played)

    def next(self, state: Any, number: int, stop: StopSignal) -> Any:
        before = time.monotonic()
        episodes = hosts.all_or_none(lambda: self._played(state, number, stop))
        self.waited["play"] += time.monotonic() - before
        self.samples = self._order(self._batches)[:, -2:]
        self._batches += 1
        return self._playing.batch(episodes, number)

    def position(self) -> tuple[Any, list[Any]]:
        """See `Experience`; it waits for the batches in flight. Stopped ones are left out."""
        before, pending = time.monotonic(), []
        for played in self._flying:
            try:
                pending.append([self._playing.save(episode) for episode in played.result()])
            except (Stopped, FeedbackLost):
                break
        self.waited["play"] += time.monotonic() - before
        return self._batches, pending

    def counts(self) -> dict[str, float]:
        return self._counts()

    def _played(self, state: Any, number: int, stop: StopSignal) -> list[Any]:
        stop.check()
        playing = self._playing
        playing.prepare(state, number, stop)
        end = min(number + playing.staleness + 1, playing.steps)
        steps = range(number + len(self._flying), end)
        params = playing.params(state) if steps else None
        for step in steps:
            numbers = self._order(self._batches + step - number)[:, 0].tolist()
            if not playing.staleness:
                return playing.play(params, numbers, step, stop)
            self._flying.append(self._thread.submit(playing.play, params, numbers, step, stop))
        episodes = wait_for(self._flying[0], stop.check)
        self._flying.popleft()
        return episodes

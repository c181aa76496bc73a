"""Plays episodes side by side, hundreds at once: one thread, a generator for each episode.

An episode asks for something (a turn of a model, a search), waits, and goes on with the reply.
Requests are started as they come, or are collected into batches where a device answers them. An
episode that fails is played again with other draws; if that is in vain it has no reward.
"""

from __future__ import annotations

import dataclasses
import hashlib
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import numpy as np

from qrag_jax.feedback.llm import Checks
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.trajectories import Sampled, Sampler, SampleRequest

LOOK_EVERY = 0.1  # seconds between looks for a signal to stop


@partial(jax.jit, static_argnums=2)
def draw_keys(key: jax.Array, numbers: jax.Array | np.ndarray, draws: int) -> jax.Array:
    """Data of PRNG keys, `[question, draw, 2]`, uint32.

    Args:
        numbers: `[question]`, uint32.
    """
    of_questions = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    of_draws = jax.vmap(lambda own: jax.vmap(jax.random.fold_in, (None, 0))(own, np.arange(draws)))
    return jax.random.key_data(of_draws(of_questions))


def key_within(key: np.ndarray, *numbers: int) -> np.ndarray:
    """The key of some of an episode's draws, uint32 `[2]`; of its first ones, if all are 0.

    Args:
        key: uint32 `[2]`, of the episode.
        numbers: of them, such as the attempt and the segment, each from 0.
    """
    if not any(numbers):
        return key
    digest = hashlib.sha256(key.astype("<u4").tobytes() + np.array(numbers, "<u4").tobytes())
    return np.frombuffer(digest.digest()[:8], "<u4").astype(np.uint32)


@dataclasses.dataclass
class Counts:
    """What episodes needed."""

    turns: int = 0  # asked of the model
    # calls of the device: of the searches of an agent, or of the turns of a policy. There is one
    # for each turn where a server samples.
    batches: int = 0
    searches: int = 0  # that were done
    shared: int = 0  # requests that another episode of the group had made already
    failed: int = 0  # episodes that failed, attempts that were repeated among them
    outside: int = 0  # sampled tokens that are no part of an episode
    lost: int = 0  # processes that were lost


class Playing:
    """One episode while it is played, an attempt that is counted from 1."""

    def __init__(self, agent: Any, start: Any, attempt: int) -> None:
        self.start, self.attempt = start, attempt
        self.ended: Any = None  # it goes on
        self._begun = False
        self._play = agent.play(start.task)

    def advance(self, reply: Any) -> Any | None:
        first, self._begun = not self._begun, True
        try:
            return next(self._play) if first else self._play.send(reply)
        except StopIteration as end:
            self.ended = end.value
            return None


class Schedule:
    """Plays one list of episodes; a subclass says how their requests are answered.

    Args:
        begin: (start, attempt) → a `Playing`.
        failed: the class of how an episode ends that is played again.
        stop: is looked at all the while; None: it is set later.
    """

    def __init__(
        self,
        begin: Callable[[Any, int], Any],
        failed: type,
        attempts: int,
        counts: Counts,
        stop: Checks | None,
    ) -> None:
        self.counts, self.stop = counts, stop
        self._begin, self._failed, self._attempts = begin, failed, attempts
        self._ready: deque[tuple[Any, Any]] = deque()  # episodes that can go on, with the reply
        self._arrived: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._flying: dict[object, tuple[Future[Any], Callable[[Any], None]]] = {}

    def run(self, starts: Sequence[Any]) -> list[Any]:
        """Plays them to their ends; each `Playing` is in the place of its start."""
        played = [self._begin(start, 1) for start in starts]
        place_of = {id(each): place for place, each in enumerate(played)}
        self._ready.extend((each, None) for each in played)
        try:
            while self._ready or self.waits() or self._flying:
                self.check()
                while self._ready:
                    each, reply = self._ready.popleft()
                    step = each.advance(reply)
                    if step is not None:
                        self.take(each, step)
                    elif isinstance(each.ended, self._failed):
                        self.counts.failed += 1
                        if each.attempt < self._attempts:
                            again = self._begin(each.start, each.attempt + 1)
                            place = place_of.pop(id(each))
                            played[place], place_of[id(again)] = again, place
                            self._ready.append((again, None))
                seconds = self.dispatch()
                self._collect(0.0 if self._ready else seconds)
        finally:
            for future, _ in self._flying.values():
                future.cancel()
        return played

    def check(self) -> None:
        """Looks for a signal to stop."""
        if self.stop is not None:
            self.stop.check()

    def take(self, playing: Any, step: Any) -> None:
        raise NotImplementedError

    def waits(self) -> bool:
        raise NotImplementedError

    def dispatch(self) -> float:
        """Starts collected requests if it is time; returns how many seconds nothing else may be."""
        raise NotImplementedError

    def reply(self, playing: Any, reply: Any) -> None:
        self._ready.append((playing, reply))

    def fly(self, future: Future[Any], arrived: Callable[[Any], None]) -> None:
        """Waits for a future beside all else; its result goes to `arrived`."""
        name = object()
        self._flying[name] = future, arrived
        future.add_done_callback(lambda _: self._arrived.put(name))

    @property
    def flies(self) -> bool:
        return bool(self._flying)

    def _collect(self, seconds: float) -> None:
        """Takes all that has arrived; waits for the first of it."""
        while self._flying:
            try:
                name = self._arrived.get(seconds > 0, seconds)
            except queue.Empty:
                return
            seconds = 0.0
            future, arrived = self._flying.pop(name)
            arrived(future.result())


class Speaking(Schedule):
    """A schedule whose episodes ask a policy for turns.

    A sampler on the device computes rows side by side: it is asked when no episode can go on
    without it. A server is asked for each turn at once.
    """

    sampler: Sampler

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        # Turns that wait to be asked for, and where they go.
        self.speaking = list[tuple[SampleRequest, Callable[[Sampled | Failure], None]]]()

    def waits(self) -> bool:
        return bool(self.speaking)

    def sample(self) -> None:
        """Asks for the turns that wait, if it is time."""
        sampler = self.sampler
        if not self.speaking or (sampler.in_rounds and self.flies):
            return
        waiting, self.speaking = self.speaking, []
        futures = sampler.submit([request for request, _ in waiting])
        self.counts.turns += len(waiting)
        self.counts.batches += 1 if sampler.in_rounds else len(waiting)
        for (_, arrived), future in zip(waiting, futures, strict=True):
            self.fly(future, arrived)

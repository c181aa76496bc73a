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
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.environments.episode import Failed
from qrag_jax.feedback.rewards import Checks
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.trajectories import Sampled, Sampler, SampleRequest


@partial(jax.jit, static_argnums=2)
def draw_keys(key: jax.Array, numbers: jax.Array | np.ndarray, draws: int) -> jax.Array:
    """Data of PRNG keys, `[question, draw, 2]`, uint32, by uint32 numbers `[question]`."""
    of_questions = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    of_draws = jax.vmap(lambda k: jax.vmap(jax.random.fold_in, (None, 0))(k, np.arange(draws)))
    return jax.random.key_data(of_draws(of_questions))


def key_within(key: np.ndarray, *numbers: int) -> np.ndarray:
    """The key, uint32 `[2]`, of some of an episode's draws; of its first ones, if all are 0.

    `numbers` are theirs, such as the attempt and the segment, each from 0.
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
    failed: int = 0  # episodes that failed, attempts that were repeated among them
    outside: int = 0  # sampled tokens that are no part of an episode
    lost: int = 0  # processes that were lost


class Playing(NamedTuple):
    place: int  # of its start in the list
    attempt: int  # from 1
    steps: Generator[Any, Any, Any]  # what it asks for → the replies; returns the played episode


class Schedule:
    """Plays one list of episodes; a subclass says what they ask for, and answers it.

    A sampler on the device computes rows side by side: it is asked when no episode can go on
    without it. A server is asked for each turn at once.

    Args:
        attempts: an episode that ends as `Failed` is played again, so often in all.
    """

    sampler: Sampler  # of turns, if episodes ask for some

    def __init__(self, attempts: int, counts: Counts) -> None:
        self.counts, self._attempts = counts, attempts
        self._ready: deque[tuple[Playing, Any]] = deque()  # episodes that can go on, with the reply
        self._arrived: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        # What is waited for as well, and where each goes.
        self.flying: dict[Future[Any], list[Callable[[Any], None]]] = {}
        # Turns that wait to be asked for, and where they go.
        self.speaking = list[tuple[SampleRequest, Callable[[Sampled | Failure], None]]]()

    def episode(self, start: Any, attempt: int) -> Generator[Any, Any, Any]:
        """An attempt, from 1, of an episode; what it returns has a field `ended`."""
        raise NotImplementedError

    def take(self, playing: Playing, step: Any) -> None:
        """Begins to answer what an episode asks for; `reply` then lets it go on."""
        raise NotImplementedError

    def waits(self) -> bool:
        """Whether something that was asked for is not begun yet."""
        return bool(self.speaking)

    def dispatch(self) -> float:
        """Starts collected requests if it is time; returns how many seconds nothing else may be."""
        raise NotImplementedError

    def run(self, starts: Sequence[Any], stop: Checks) -> list[Any]:
        """Plays episodes to their ends; each is in the place of its start.

        `stop` is looked at all the while.
        """
        self.stop = stop
        played: list[Any] = [None] * len(starts)

        def begin(place: int, attempt: int) -> None:
            self.reply(Playing(place, attempt, self.episode(starts[place], attempt)), None)

        for place in range(len(starts)):
            begin(place, 1)
        try:
            while self._ready or self.waits() or self.flying:
                stop.check()
                while self._ready:
                    episode, reply = self._ready.popleft()
                    try:
                        step = episode.steps.send(reply)
                    except StopIteration as end:
                        played[episode.place] = end.value
                        if isinstance(end.value.ended, Failed):
                            self.counts.failed += 1
                            if episode.attempt < self._attempts:
                                begin(episode.place, episode.attempt + 1)
                        continue
                    self.take(episode, step)
                seconds = self.dispatch()
                self._collect(0.0 if self._ready else seconds)
        finally:
            for future in self.flying:
                future.cancel()
        return played

    def reply(self, playing: Playing, reply: Any) -> None:
        self._ready.append((playing, reply))

    def fly(self, future: Future[Any], arrived: Callable[[Any], None]) -> None:
        """Waits for a future as well; its result goes to `arrived`."""
        if future not in self.flying:
            self.flying[future] = []
            future.add_done_callback(self._arrived.put)
        self.flying[future].append(arrived)

    def sample(self) -> None:
        """Asks for the turns that wait, if it is time."""
        if not self.speaking or (self.sampler.in_rounds and self.flying):
            return
        waiting, self.speaking = self.speaking, []
        futures = self.sampler.submit([request for request, _ in waiting])
        self.counts.turns += len(waiting)
        self.counts.batches += 1 if self.sampler.in_rounds else len(waiting)

        def read(request: SampleRequest, arrived: Callable[..., None], result: Any) -> None:
            arrived(self.sampler.read(request, result))

        for (request, arrived), future in zip(waiting, futures, strict=True):
            self.fly(future, partial(read, request, arrived))

    def _collect(self, seconds: float) -> None:
        """Takes all that has arrived; waits for the first of it."""
        while self.flying:
            try:
                future = self._arrived.get(seconds > 0, seconds)
            except queue.Empty:
                return
            seconds = 0.0
            for arrived in self.flying.pop(future):
                arrived(future.result())

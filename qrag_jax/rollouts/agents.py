"""Plays episodes of agents, hundreds at once.

The language model answers when it answers; the searches that are waiting by then are one call of
the device. One thread plays all episodes: an agent is a generator without effects, and the model's
client has a thread of its own.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from qrag_jax.environments.episode import (
    Agent,
    Complete,
    Ended,
    Failed,
    Play,
    Reply,
    Retrieve,
    Step,
    Task,
)
from qrag_jax.errors import InputError, check_least
from qrag_jax.llm.outcomes import Failure, Outcome, Request
from qrag_jax.rollouts.draw_keys import key_within
from qrag_jax.rollouts.pool_search import Ask, Drawn, Found

_LOOK_EVERY = 0.1  # seconds between looks for a signal to stop

Search = Callable[[Sequence[Ask]], Sequence[Found | Failure]]


class Asks(Protocol):
    """Asks a language model: one outcome per request, in their order; a failure raises no error."""

    def submit(self, requests: Sequence[Request]) -> Future[list[Outcome]]:
        """Starts the requests."""
        ...


@dataclasses.dataclass(frozen=True)
class PlayConfig:
    """How episodes are played."""

    attempts: int = 2  # an episode that breaks is played again, so often in all
    gather: float = 0.02  # seconds that a search waits for those of other episodes

    def __post_init__(self) -> None:
        check_least("agent", self, attempts=1)
        if not self.gather >= 0:
            raise InputError(f"config.agent.gather is {self.gather}; give seconds, 0 at least.")


class Start(NamedTuple):
    """An episode to play.

    Attributes:
        task: what the agent is asked.
        group: equal for the episodes of one question that are compared. Requests that depend on the
            question alone are made once for all of them.
        key: uint32 `[2]`, data of the PRNG key of the episode's draws.
    """

    task: Task
    group: Hashable
    key: np.ndarray


class Episode(NamedTuple):
    """A played episode.

    Attributes:
        ended: with an answer, or why there is none.
        searches: what the policy did, one for each search of the last attempt.
        attempts: how often it was played.
    """

    ended: Ended
    searches: tuple[Drawn, ...]
    attempts: int


@dataclasses.dataclass
class Counts:
    """What the episodes needed.

    Attributes:
        calls: requests to the language model.
        shared: requests that another episode of the group had made already.
        searches: number of searches.
        batches: calls of the device that computed them.
        broken: episodes that broke, attempts that were repeated among them.
    """

    calls: int = 0
    shared: int = 0
    searches: int = 0
    batches: int = 0
    broken: int = 0

    def add(self, others: Counts) -> None:
        """Adds others to these."""
        for field in dataclasses.fields(Counts):
            total = getattr(self, field.name) + getattr(others, field.name)
            setattr(self, field.name, total)


class Checks(Protocol):
    """Says whether to go on."""

    def check(self) -> None:
        """Raises an error if not."""
        ...


class AgentRollout:
    """Plays the episodes of an agent.

    Args:
        agent: decides what is asked and searched for.
        search: finds passages for a batch of searches.
        model: the language model; None: the agent needs none.
        stop: looked at while this waits, such as a `StopSignal`.

    Attributes:
        counts: over all calls of `play`.
    """

    def __init__(
        self,
        agent: Agent,
        search: Search,
        model: Asks | None,
        config: PlayConfig,
        stop: Checks,
    ) -> None:
        self.counts = Counts()
        self._agent, self._search, self._model = agent, search, model
        self._config, self._stop = config, stop

    def play(self, starts: Sequence[Start]) -> list[Episode]:
        """Plays the episodes side by side; each is returned in the place of its start.

        Raises:
            Stopped: the run is told to stop; the requests in flight are cancelled.
        """
        course = _Course(self._agent, self._search, self._model, self._config, self.counts)
        try:
            return course.run(starts, self._stop)
        finally:
            course.close()


class _Playing:
    """One episode while it is played."""

    def __init__(self, start: Start, agent: Agent, attempt: int = 1) -> None:
        self.start, self.attempt = start, attempt
        self.searches: list[Drawn] = []
        self.ended: Ended | None = None
        self._play: Play = agent.play(start.task)

    def advance(self, reply: Reply | None) -> Step | None:
        """What it asks for next; None: it has ended."""
        try:
            return next(self._play) if reply is None else self._play.send(reply)
        except StopIteration as end:
            self.ended = end.value
            return None

    def ask(self, step: Retrieve) -> Ask:
        """What is searched for; another attempt has other draws."""
        key = key_within(self.start.key, self.attempt - 1)
        return Ask(self.start.task.question, step, key)

    def request(self, step: Complete) -> Request:
        """What the model is asked; another attempt has another seed, and so another reply."""
        if self.attempt == 1:
            return step.request
        seed = (step.request.seed or 0) + self.attempt - 1
        return dataclasses.replace(step.request, seed=seed)


@dataclasses.dataclass
class _Call:
    """A request in flight, and the episodes that wait for its outcome."""

    waiting: list[_Playing]
    future: Future[list[Outcome]]


class _Course:
    """Plays one list of episodes."""

    def __init__(
        self,
        agent: Agent,
        search: Search,
        model: Asks | None,
        config: PlayConfig,
        counts: Counts,
    ) -> None:
        self._agent, self._search, self._model = agent, search, model
        self._config, self._counts = config, counts
        self._arrived: queue.SimpleQueue[Hashable] = queue.SimpleQueue()
        self._calls: dict[Hashable, _Call] = {}
        # What depends on a question alone, by group and request.
        self._known: dict[Hashable, Outcome] = {}
        self._ready: deque[tuple[_Playing, Reply | None]] = deque()
        self._searches: list[tuple[_Playing, Retrieve]] = []
        self._since = 0.0  # when the first of these began to wait

    def run(self, starts: Sequence[Start], stop: Checks) -> list[Episode]:
        """Plays them to their ends."""
        playing = [_Playing(start, self._agent) for start in starts]
        place = {id(each): number for number, each in enumerate(playing)}
        self._ready.extend((each, None) for each in playing)
        while self._ready or self._searches or self._calls:
            stop.check()
            while self._ready:
                each, reply = self._ready.popleft()
                again = self._advance(each, reply)
                if again is not None:
                    number = place.pop(id(each))
                    playing[number], place[id(again)] = again, number
                self._collect()
            self._wait()
        episodes = []
        for each in playing:
            assert each.ended is not None
            episodes.append(Episode(each.ended, tuple(each.searches), each.attempt))
        return episodes

    def close(self) -> None:
        """Cancels what is in flight."""
        for call in self._calls.values():
            call.future.cancel()

    def _advance(self, each: _Playing, reply: Reply | None) -> _Playing | None:
        """Goes on with an episode; returns the one that takes its place if it is repeated."""
        step = each.advance(reply)
        if isinstance(step, Retrieve):
            if not self._searches:
                self._since = time.monotonic()
            self._searches.append((each, step))
        elif isinstance(step, Complete):
            self._begin(each, step)
        elif isinstance(each.ended, Failed):
            self._counts.broken += 1
            if each.attempt < self._config.attempts:
                again = _Playing(each.start, self._agent, each.attempt + 1)
                self._ready.append((again, None))
                return again
        return None

    def _begin(self, each: _Playing, step: Complete) -> None:
        """Asks the model, unless an episode of the group has asked the same."""
        if self._model is None:
            raise InputError("this agent asks a language model, and the run has none.")
        request = each.request(step)
        name: Hashable = (each.start.group, request) if step.shared else object()
        if name in self._known:
            self._counts.shared += 1
            self._ready.append((each, self._known[name]))
        elif name in self._calls:
            self._counts.shared += 1
            self._calls[name].waiting.append(each)
        else:
            self._counts.calls += 1
            future = self._model.submit([request])
            self._calls[name] = _Call([each], future)
            future.add_done_callback(lambda _: self._arrived.put(name))

    def _collect(self, timeout: float | None = None) -> None:
        """Takes the outcomes that have arrived; waits for the first of them up to `timeout`."""
        while True:
            try:
                name = self._arrived.get(timeout is not None, timeout)
            except queue.Empty:
                return
            timeout = None
            call = self._calls.pop(name)
            (outcome,) = call.future.result()
            if isinstance(name, tuple) and not isinstance(outcome, Failure):
                self._known[name] = outcome
            self._ready.extend((each, outcome) for each in call.waiting)

    def _wait(self) -> None:
        """Waits for outcomes, or searches if that has waited long enough."""
        if self._ready:
            return
        left = self._config.gather - (time.monotonic() - self._since)
        if self._searches and (not self._calls or left <= 0):
            self._find()
        elif self._calls:
            self._collect(min(left, _LOOK_EVERY) if self._searches else _LOOK_EVERY)

    def _find(self) -> None:
        """Does all searches that are waiting."""
        waiting, self._searches = self._searches, []
        found: Sequence[Any] = self._search([each.ask(step) for each, step in waiting])
        self._counts.searches += len(waiting)
        self._counts.batches += 1
        for (each, _), one in zip(waiting, found, strict=True):
            if isinstance(one, Failure):
                self._ready.append((each, one))
            else:
                each.searches.append(one.drawn)
                self._ready.append((each, one.passages))

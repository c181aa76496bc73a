"""Plays episodes of agents whose searches are the policy's.

The language model answers when it answers; the searches that are waiting by then are one call of
the device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from qrag_jax.environments.episode import (
    MALFORMED_CALL,
    NO_RETRIEVAL,
    OWN_CODE,
    Agent,
    Complete,
    Ended,
    Retrieve,
    Task,
)
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewards import PERMANENT, Checks
from qrag_jax.llm.outcomes import Failure, Outcome, Request
from qrag_jax.rollouts.pool_search import Ask, Drawn, Found
from qrag_jax.rollouts.schedule import Counts, Playing, Schedule, key_within
from qrag_jax.runtime.interrupt import LOOK_EVERY

# Playing again, even later, does not change these.
HOPELESS = (*PERMANENT, NO_RETRIEVAL, MALFORMED_CALL, OWN_CODE)
ADVICE = (
    "use a model that follows the agent's prompts, raise config.llm.max_tokens or "
    "config.agent.max_broken_share, or give prompts of your own (config.agent.prompts); an agent "
    "of your own (config.agent.path) must be mended"
)

Search = Callable[[Sequence[Ask]], Sequence[Found | Failure]]


class Asks(Protocol):
    """Asks a language model: one outcome per request, in their order; a failure raises no error."""

    def submit(self, requests: Sequence[Request]) -> Future[list[Outcome]]: ...


@dataclasses.dataclass(frozen=True)
class PlayConfig:
    attempts: int = 2  # an episode that breaks is played again, so often in all
    gather: float = 0.02  # seconds that a search waits for those of other episodes


class Start(NamedTuple):
    task: Task  # what the agent is asked
    # equal for the episodes of one question that are compared. Requests that depend on the question
    # alone are made once for all of them.
    group: Hashable
    key: np.ndarray  # uint32 `[2]`, data of the PRNG key of the episode's draws


class Episode(NamedTuple):
    ended: Ended  # with an answer, or why there is none
    searches: tuple[Drawn, ...]  # what the policy did, one for each search of the last attempt
    attempts: int  # how often it was played


class AgentRollout(Schedule):
    def __init__(
        self, agent: Agent, search: Search, model: Asks | None, config: PlayConfig, stop: Checks
    ) -> None:
        super().__init__(config.attempts, Counts(), stop)
        self._agent, self._search, self._model, self._gather = agent, search, model, config.gather
        # What depends on a question alone, by group and request: outcomes, and who waits for one.
        self._known: dict[Hashable, Outcome] = {}
        self._sharing: dict[Hashable, list[Playing]] = {}
        self._searches: list[tuple[Playing, Ask]] = []
        self._since = 0.0  # when the first of these began to wait

    def play(self, starts: Sequence[Start]) -> list[Episode]:
        """Plays the episodes side by side; each is returned in the place of its start."""
        self._known.clear()
        return self.run(starts)

    def episode(self, start: Start, attempt: int) -> Generator[Any, Any, Episode]:
        """Asks for an `Ask`, or for a request with a name: the same is asked once; None: always."""
        key, searches = key_within(start.key, attempt - 1), list[Drawn]()
        play = self._agent.play(start.task)
        reply: Any = None
        while True:
            try:
                step = play.send(reply)
            except StopIteration as end:
                return Episode(end.value, tuple(searches), attempt)
            if isinstance(step, Complete):
                request = step.request
                if attempt > 1:  # another seed, and so another reply
                    seed = (request.seed or 0) + attempt - 1
                    request = dataclasses.replace(request, seed=seed)
                reply = yield request, (start.group, request) if step.shared else None
                continue
            assert isinstance(step, Retrieve)
            reply = yield Ask(start.task.question, step, key)
            if isinstance(reply, Found):
                searches.append(reply.drawn)
                reply = reply.passages

    def take(self, playing: Playing, step: Any) -> None:
        if not isinstance(step, Ask):
            self._request(playing, *step)
            return
        if not self._searches:
            self._since = time.monotonic()
        self._searches.append((playing, step))

    def waits(self) -> bool:
        return bool(self._searches)

    def dispatch(self) -> float:
        """Searches if that has waited long enough, or nothing else is waited for."""
        left = self._gather - (time.monotonic() - self._since)
        if not self._searches:
            return LOOK_EVERY
        if self.flying and left > 0:
            return min(left, LOOK_EVERY)
        waiting, self._searches = self._searches, []
        found = self._search([ask for _, ask in waiting])
        self.counts.searches += len(waiting)
        self.counts.batches += 1
        for (each, _), one in zip(waiting, found, strict=True):
            self.reply(each, one)
        return 0.0

    def _request(self, playing: Playing, request: Request, name: Hashable) -> None:
        """Asks the model, unless an episode of the group has asked the same."""
        if self._model is None:
            raise InputError("config.agent asks a language model, and config.llm names none.")
        if name in self._known:
            self.counts.shared += 1
            self.reply(playing, self._known[name])
        elif name in self._sharing:
            self.counts.shared += 1
            self._sharing[name].append(playing)
        else:
            self.counts.turns += 1
            group = [playing]
            if name is not None:
                self._sharing[name] = group
            arrived = partial(self._arrive, name, group)
            self.fly(self._model.submit([request]), arrived)

    def _arrive(self, name: Hashable, group: list[Playing], outcomes: list[Outcome]) -> None:
        (outcome,) = outcomes
        if name is not None:
            del self._sharing[name]
            if not isinstance(outcome, Failure):
                self._known[name] = outcome
        for each in group:
            self.reply(each, outcome)

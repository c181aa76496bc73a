"""Plays episodes of agents whose searches are the policy's.

The language model answers when it answers; the searches that are waiting by then are one call of
the device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
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
    Failed,
    Retrieve,
    Step,
    Task,
)
from qrag_jax.errors import InputError
from qrag_jax.feedback.llm import PERMANENT, Checks
from qrag_jax.llm.outcomes import Failure, Outcome, Request
from qrag_jax.rollouts.pool_search import Ask, Drawn, Found
from qrag_jax.rollouts.schedule import LOOK_EVERY, Counts, Playing, Schedule, key_within

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

    def submit(self, requests: Sequence[Request]) -> Future[list[Outcome]]:
        """Starts the requests."""
        ...


@dataclasses.dataclass(frozen=True)
class PlayConfig:
    """How episodes are played."""

    attempts: int = 2  # an episode that breaks is played again, so often in all
    gather: float = 0.02  # seconds that a search waits for those of other episodes


class Start(NamedTuple):
    """An episode to play."""

    task: Task  # what the agent is asked
    # equal for the episodes of one question that are compared. Requests that depend on the question
    # alone are made once for all of them.
    group: Hashable
    key: np.ndarray  # uint32 `[2]`, data of the PRNG key of the episode's draws


class Episode(NamedTuple):
    """A played episode."""

    ended: Ended  # with an answer, or why there is none
    searches: tuple[Drawn, ...]  # what the policy did, one for each search of the last attempt
    attempts: int  # how often it was played


class _Episode(Playing):
    """One episode, with what the policy did in it."""

    def __init__(self, agent: Agent, start: Start, attempt: int) -> None:
        super().__init__(agent, start, attempt)
        self.searches: list[Drawn] = []

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


class AgentRollout(Schedule):
    """Plays the episodes of an agent."""

    def __init__(
        self,
        agent: Agent,
        search: Search,
        model: Asks | None,
        config: PlayConfig,
        stop: Checks,
    ) -> None:
        super().__init__(partial(_Episode, agent), Failed, config.attempts, Counts(), stop)
        self._search, self._model, self._gather = search, model, config.gather
        # What depends on a question alone, by group and request: outcomes, and who waits for one.
        self._known: dict[Hashable, Outcome] = {}
        self._sharing: dict[Hashable, list[_Episode]] = {}
        self._searches: list[tuple[_Episode, Retrieve]] = []
        self._since = 0.0  # when the first of these began to wait

    def play(self, starts: Sequence[Start]) -> list[Episode]:
        """Plays the episodes side by side; each is returned in the place of its start."""
        self._known.clear()
        played = self.run(starts)
        return [Episode(each.ended, tuple(each.searches), each.attempt) for each in played]

    def take(self, playing: _Episode, step: Step) -> None:
        if isinstance(step, Complete):
            self._begin_request(playing, step)
            return
        assert isinstance(step, Retrieve)
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
        if self.flies and left > 0:
            return min(left, LOOK_EVERY)
        waiting, self._searches = self._searches, []
        found: Sequence[Any] = self._search([each.ask(step) for each, step in waiting])
        self.counts.searches += len(waiting)
        self.counts.batches += 1
        for (each, _), one in zip(waiting, found, strict=True):
            if isinstance(one, Failure):
                self.reply(each, one)
            else:
                each.searches.append(one.drawn)
                self.reply(each, one.passages)
        return 0.0

    def _begin_request(self, playing: _Episode, step: Complete) -> None:
        """Asks the model, unless an episode of the group has asked the same."""
        if self._model is None:
            raise InputError("config.agent asks a language model, and config.llm names none.")
        request = playing.request(step)
        name: Hashable = (playing.start.group, request) if step.shared else object()
        if name not in self._known and name not in self._sharing:
            self.counts.turns += 1
            self._sharing[name] = [playing]
            self.fly(self._model.submit([request]), lambda outcomes: self._arrive(name, outcomes))
            return
        self.counts.shared += 1
        if name in self._known:
            self.reply(playing, self._known[name])
        else:
            self._sharing[name].append(playing)

    def _arrive(self, name: Hashable, outcomes: list[Outcome]) -> None:
        (outcome,) = outcomes
        if isinstance(name, tuple) and not isinstance(outcome, Failure):
            self._known[name] = outcome
        for each in self._sharing.pop(name):
            self.reply(each, outcome)

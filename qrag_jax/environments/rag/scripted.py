"""Agents without a language model: one that follows decompositions, and one in a user's own code.

The first asks the sub-questions that the data set's makers wrote, and it knows the right answer of
each: "reading" means to look whether that answer stands in the passages. So it shows what a
retriever learns, quickly and without a server, and not what an agent can do: it never asks the
wrong question and is never misled, but it also takes a passage that names the answer for another
reason.

The second is a Python generator that searches, by the path of its file:

    def agent(question, max_searches):
        passages = yield question                      # a search; it is sent a list of texts
        name = first_name(passages)
        passages = yield f"Where was {name} born?", name  # and what the search before it said
        return first_place(passages)                   # the answer

It yields the text to search for, or a pair of it and what the passages before say, which becomes
part of the state that the query encoder reads. An episode in which it raises, searches too often,
or gives something else fails: it has no reward, and is counted. It runs in this process: there is
no sandbox.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from qrag_jax.data.sample import Decomposition
from qrag_jax.environments.episode import (
    FOUND,
    NOT_FOUND,
    OWN_CODE,
    Hop,
    Limits,
    Reply,
    Step,
    Task,
    Unplayable,
)
from qrag_jax.environments.rag.trail import SearchingAgent, Trail
from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import normalise
from qrag_jax.runtime import own_code
from qrag_jax.runtime.own_code import OwnCode

PATH = "config.agent.path"
_TAKES = ("question", "max_searches")
_JOINED = re.compile(r"[-‐‑–—−/]")  # "French-American" says "French"


@dataclasses.dataclass(frozen=True)
class Scripted(SearchingAgent):
    """Plays episodes by decompositions.

    A sub-question whose answer stands in the passages found has the status FOUND, else NOT_FOUND,
    and is asked again. If the retrievals are used up before all answers are found, the agent gives
    up with the answer "". Otherwise its answer is that of the last hop or, where the hops' answers
    are compared, the data's own.
    """

    decompositions: Mapping[str, Decomposition]  # by the question's id
    limits: Limits = dataclasses.field(default_factory=Limits)  # `max_hops` counts

    def __post_init__(self) -> None:
        for name, each in self.decompositions.items():
            if len(each.hops) > self.limits.max_hops:
                raise InputError(
                    f"question {name} has {len(each.hops)} hops, and config.agent.max_hops is "
                    f"{self.limits.max_hops}; raise it, or leave out such questions."
                )

    def answer(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        """See `SearchingAgent`."""
        if task.id not in self.decompositions:
            raise InputError(
                f"question {task.id} has no decomposition, without which the scripted agent cannot "
                "play; leave it out, or use an agent with a language model."
            )
        whole, answers = self.decompositions[task.id], list[str]()
        for hop in whole.hops:
            sub_query, found = hop.filled(answers), ""
            while not found:
                if trail.searches == self.limits.max_hops:
                    return ""
                passages = yield from trail.search(sub_query)
                found = named(hop.answers, (passage.whole for passage in passages))
                trail.hops.append(Hop(sub_query, found, FOUND if found else NOT_FOUND))
            answers.append(found)
        chained = normalise(answers[-1]) in map(normalise, whole.answers)
        return answers[-1] if chained else whole.answers[0]


def named(answers: Iterable[str], texts: Iterable[str]) -> str:
    """The first answer that one of the texts has as whole words, in normal form; else ""."""
    padded = [f" {_words(text)} " for text in texts]
    for answer in answers:
        words = _words(answer)
        if words and any(f" {words} " in text for text in padded):
            return answer
    return ""


def _words(text: str) -> str:
    return normalise(_JOINED.sub(" ", text))


@dataclasses.dataclass(frozen=True)
class OwnAgent(SearchingAgent):
    """Plays episodes by a user's generator."""

    code: OwnCode
    limits: Limits  # `max_hops` counts

    @classmethod
    def load(cls, path: str, limits: Limits) -> OwnAgent:
        """Runs the file."""
        return cls(own_code.load(path, PATH, _TAKES), limits)

    def answer(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        """See `SearchingAgent`."""
        most, texts, last = self.limits.max_hops, None, ""
        steps = self._next(lambda: self.code.function(question=task.question, max_searches=most))
        if not inspect.isgenerator(steps):
            raise self._wrong(f"gave {steps!r:.60}, no generator; yield the searches")
        try:
            while True:
                ended, given = self._next(functools.partial(_sent, steps, texts))
                query, read = self._answered(given) if ended else self._asked(given)
                if trail.searches:
                    trail.hops.append(Hop(last, read))
                if ended:
                    return query
                if trail.searches == most:
                    raise self._wrong(f"searched more than {most} times (config.agent.max_hops)")
                last, passages = query, (yield from trail.search(query))
                texts = [passage.whole for passage in passages]
        finally:
            steps.close()

    def _asked(self, given: Any) -> tuple[str, str]:
        """The text to search for, and what the passages before say."""
        query, read = given if isinstance(given, tuple) and len(given) == 2 else (given, "")
        if not isinstance(query, str) or not isinstance(read, str) or not query.strip():
            raise self._wrong(f"yielded {given!r:.60}, no text to search for")
        return query, read

    def _answered(self, given: Any) -> tuple[str, str]:
        """The answer, which is also what the last passages say."""
        if not isinstance(given, str):
            raise self._wrong(f"returned {given!r:.60}, no text")
        return given, given

    def _next(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise self._wrong(f"raised {own_code.told(error)}") from error

    def _wrong(self, what: str) -> Unplayable:
        return Unplayable(OWN_CODE, f"{self.code.spec} {what}.")


def _sent(steps: Generator[Any, Any, Any], texts: list[str] | None) -> tuple[bool, Any]:
    """Whether the generator has ended, and what it yields or returns."""
    try:
        return False, steps.send(texts)
    except StopIteration as end:
        return True, end.value

"""An agent of a user's own: a Python generator that searches, by the path of its file.

    def agent(question, max_searches):
        passages = yield question                      # a search; it is sent a list of texts
        name = first_name(passages)
        passages = yield f"Where was {name} born?", name  # and what the search before it said
        return first_place(passages)                   # the answer

It yields the text to search for, or a pair of it and what the passages before say, which becomes
part of the state that the query encoder reads. An episode in which it raises, searches too often,
or gives something else is broken: it has no reward, and is counted. It runs in this process: there
is no sandbox.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

from qrag_jax.environments.rag.episode import OWN_CODE, Hop, Limits, Play, Reply, Step, Task
from qrag_jax.environments.rag.trail import Trail, Unplayable, played
from qrag_jax.runtime import own_code
from qrag_jax.runtime.own_code import OwnCode

PATH = "config.agent.path"
TAKES = ("question", "max_searches")


@dataclasses.dataclass(frozen=True)
class OwnAgent:
    """Plays episodes by a user's generator.

    Attributes:
        limits: `max_hops` counts.
    """

    code: OwnCode
    limits: Limits

    @classmethod
    def load(cls, path: str, limits: Limits) -> OwnAgent:
        """Runs the file."""
        return cls(own_code.load(path, PATH, TAKES), limits)

    def play(self, task: Task) -> Play:
        """One episode."""
        trail = Trail()
        return played(trail, self._steps(task, trail))

    def _steps(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
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

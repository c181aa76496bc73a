"""Rewards that a rubric of verifiers below 0.4 failed to give.

A rubric takes a function that raises for a reward of 0, and only logs it. Here it is noted, so that
the episode is masked and nothing is learned from a wrong 0.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .wire import EpisodeFailed, told

_NOTES: contextvars.ContextVar[list[EpisodeFailed]] = contextvars.ContextVar("faults")
_FAULT = "qrag_fault"  # key of a state


class FaultyRubric:
    """Scores episodes by an environment's rubric, and notes the faults of its functions."""

    def __init__(self, rubric: Any) -> None:
        self._rubric = rubric
        for each in _all_of(rubric):
            each.funcs = [
                _noted(function) if weight else function
                for function, weight in zip(each.funcs, each.weights)
            ]

    async def score(self, states: Sequence[Any]) -> None:
        """Scores the episodes of one task: together if the rubric compares them."""
        if self._rubric.has_group_rewards:
            await self._one(states, self._rubric.score_group, states)
        else:
            for state in states:
                await self._one([state], self._rubric.score_rollout, state)

    @staticmethod
    def fault(state: Any) -> EpisodeFailed | None:
        """Why the reward of an episode is none; None if it is one."""
        return state.get(_FAULT)

    async def _one(self, states: Sequence[Any], score: Callable[..., Any], given: Any) -> None:
        notes = list[EpisodeFailed]()
        token = _NOTES.set(notes)
        try:
            await score(given)
        except Exception as error:
            notes.append(EpisodeFailed("raised", f"the rubric raised ({told(error)})"))
        finally:
            _NOTES.reset(token)
        for state in states:
            if notes:
                state[_FAULT] = notes[0]


def _all_of(rubric: Any) -> Iterator[Any]:
    """A rubric and those inside of it, each once."""
    seen, left = set[int](), [rubric]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += getattr(each, "rubrics", None) or []
        left += [env.rubric for env in (getattr(each, "env_map", None) or {}).values()]


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(function, "__name__", "a function")

    def note(cause: str, what: str) -> None:
        _NOTES.get([]).append(EpisodeFailed(cause, f"the rubric's {name} {what}"))

    def checked(result: Any) -> Any:
        for value in result if isinstance(result, list | tuple) else [result]:
            try:
                fine = math.isfinite(float(value))
            except (TypeError, ValueError):
                fine = False
            if not fine:
                note("no_number", f"gives {value!r}, which is no number")
        return result

    async def later(result: Any) -> Any:
        try:
            return checked(await result)
        except Exception as error:
            note("raised", f"raised ({told(error)})")
            raise

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            note("raised", f"raised ({told(error)})")
            raise
        return later(result) if inspect.isawaitable(result) else checked(result)

    return call

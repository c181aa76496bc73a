"""Runs a row's commands once each, and keeps what they cost in the row's folder.

A command that was stopped is given again and goes on where it was; its costs are added up. One that
has ended is not given again. A start that was killed with this process leaves no costs, but it is
counted.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import command
from qrag_jax.runtime.whole_files import write_whole

COSTS = "costs.json"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step took, over all of its starts.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of the processors, all threads of this process and of those it started.
        starts: how often it was begun.
        untold: how many of these left no costs, because this process was killed with them.
        ended: whether it has ended well.
        given: what it was given, by which a changed step is known.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    starts: int = 0
    ended: bool = False
    given: tuple[str, ...] = ()
    untold: int = 0


Run = Callable[..., None]


def costs_of(folder: Path) -> dict[str, Cost]:
    """The costs of a row's steps, by their names."""
    path = folder / COSTS
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return {name: Cost(**cost | {"given": tuple(cost["given"])}) for name, cost in kept.items()}


def once(folder: Path, step: str, *words: Any, run: Run = command) -> Cost:
    """Gives a command if it has not ended yet; returns what it took.

    Args:
        folder: of the row.
        step: its name.
        words: module and flags.
        run: gives the command.
    """
    given = tuple(map(str, words))
    with timed(folder, step, given) as is_needed:
        if is_needed:
            run(*given)
    return costs_of(folder)[step]


@contextmanager
def timed(folder: Path, step: str, given: Sequence[str] = ()) -> Iterator[bool]:
    """Adds what is done inside to the costs of a step.

    Args:
        given: what the step depends on; other words begin it anew.

    Yields:
        whether it has yet to be done; if not, nothing is added.
    """
    before = costs_of(folder).get(step, Cost())
    if before.given != tuple(given):
        before = Cost(given=tuple(given))
    if before.ended:
        yield False
        return
    # Written before it begins: if nothing is written after it, this start has been killed.
    _keep(
        folder,
        step,
        dataclasses.replace(before, starts=before.starts + 1, untold=before.untold + 1),
    )
    seconds, cpu, ended = time.monotonic(), _cpu_seconds(), False
    try:
        yield True
        ended = True
    finally:
        after = Cost(
            before.seconds + time.monotonic() - seconds,
            before.cpu_seconds + _cpu_seconds() - cpu,
            before.starts + 1,
            ended,
            tuple(given),
            before.untold,
        )
        _keep(folder, step, after)


def _keep(folder: Path, step: str, cost: Cost) -> None:
    kept = costs_of(folder) | {step: cost}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: dataclasses.asdict(each) for name, each in kept.items()}, indent=1)
    write_whole(folder / COSTS, text + "\n")


def per_question(warm: Cost, full: Cost, fewer: int, all_of_them: int) -> float | None:
    """Milliseconds a question, from a command with few questions and the same one with all.

    What both do alike, such as starting and compiling, is not in it. None: there are not more
    questions than the few, or the clock says nothing because a command was broken off.
    """
    more, seconds = all_of_them - fewer, full.seconds - warm.seconds
    if more <= 0 or seconds <= 0 or max(warm.starts, full.starts) > 1:
        return None
    return 1e3 * seconds / more


def _cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)

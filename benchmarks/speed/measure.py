"""Times our program and its peers in turns, and makes a case of it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.report import Case
from tests.support.decoders import EQUAL_GRADIENT, EQUAL_LOSS, differences

OURS = "ours"

Program = Callable[[int], object]
Update = tuple[float, Mapping[str, np.ndarray]]  # its loss, and its gradient by names


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases share.

    Attributes:
        quick: sizes are tiny, and no ratio has a target.
        rounds: measured rounds of each program.
        folder: for whatever the cases write.
    """

    quick: bool
    rounds: int
    folder: Path

    @property
    def device(self) -> str:
        """Where torch computes."""
        return "cuda" if on_gpu() else "cpu"

    @property
    def blocks(self) -> dict[str, Any]:
        """Fields of an encoder's config: quick sizes have one shape of block to compile."""
        return {"length_buckets": 1, "block_sizes": 1} if self.quick else {}

    def least(self, ratio: float | None) -> float | None:
        """A target for the ratio, which quick sizes do not have."""
        return None if self.quick else ratio


@dataclasses.dataclass
class Timing:
    """Seconds of each measured round, and those of the first call beyond a later one."""

    seconds: list[float]
    compile: float

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


def calling(function: Callable[..., object], *arguments: object) -> Program:
    """The program that calls a function with these arguments, whatever the round."""
    return lambda _: function(*arguments)


def on_gpu() -> bool:
    """Whether jax computes on a GPU."""
    return jax.default_backend() == "gpu"


def interleave(programs: Mapping[str, Program], rounds: int) -> dict[str, Timing]:
    """Times programs in turns: a, b, a, b, …

    Each program is called with the number of the call, from 0, and must wait for its result. The
    first two calls are not measured: the first compiles, the second may compile for other layouts.
    """
    result: dict[str, Timing] = {}
    for name, program in programs.items():
        first, again = (_seconds(program, number) for number in range(2))
        result[name] = Timing([], max(first - again, 0.0))
    for number in range(rounds):
        for name, program in programs.items():
            result[name].seconds.append(_seconds(program, 2 + number))
    return result


def _seconds(program: Program, number: int) -> float:
    start = time.perf_counter()
    program(number)
    return time.perf_counter() - start


def beside(
    setting: Setting,
    name: str,
    amount: float | Callable[[], float],
    unit: str,
    programs: Mapping[str, Program],
    *,
    least: float | None = None,
    details: Mapping[str, float | str] | None = None,
) -> Case:
    """The case of our program against the fastest of its peers.

    Args:
        amount: what a call of any of the programs gets done, in `unit` but for "/s"; a function
            is called after the programs.
        programs: by name; ours is `OURS`.
        least: the target for the ratio: the median over the rounds of the peer's seconds to ours.
        details: further figures.
    """
    timings = interleave(programs, setting.rounds)
    done = amount() if callable(amount) else amount
    ours = timings.pop(OURS)
    fastest = min(timings, key=lambda peer: timings[peer].median)
    peer = timings[fastest]
    ratio = statistics.median(p / o for p, o in zip(peer.seconds, ours.seconds, strict=True))
    least = setting.least(least)
    return Case(
        name,
        done / ours.median,
        unit,
        peer=done / peer.median,
        ratio=ratio,
        target=None if least is None else f">= {least:g} times the peer",
        holds=None if least is None else ratio >= least,
        details={
            "peer": fastest,
            **{f"{side}, {unit}": done / timings[side].median for side in timings},
            "compile, s": ours.compile,
            **(details or {}),
        },
    )


def with_details(case: Case, **details: float | str) -> Case:
    """The case with further figures."""
    return dataclasses.replace(case, details={**case.details, **details})


def equal(name: str, difference: float, most: float, **details: float) -> Case:
    """The case that both sides compute the same: a difference of at most `most`."""
    return Case(
        name, difference, "", target=f"<= {most:g}", holds=difference <= most, details=details
    )


def same_update(title: str, ours: Update, theirs: Update, **details: float) -> Iterator[Case]:
    """The cases that both sides have the same loss and gradient, by the same names."""
    loss, gradient = differences(ours, theirs)
    compared = {"ours": ours[0], "theirs": theirs[0], **details}
    yield equal(f"{title}: difference of the losses", loss, EQUAL_LOSS, **compared)
    yield equal(f"{title}: of the gradients, over the largest", gradient, EQUAL_GRADIENT)

"""Finds signs that a training does not learn, from what it has logged so far.

Each rule looks at one number that a sound training does not show, and no rule stops a run.
docs/troubles.md has the likely causes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

# What the rules are called; also the headings in docs/troubles.md.
FLAT, WORSE, NO_ENTROPY = "flat", "worse", "no-entropy"
EQUAL_Q, SKIPPED, NO_GRADIENT = "equal-q", "skipped", "no-gradient"
FLAT_GROUPS, ONE_RETURN = "flat-groups", "one-return"
KINDS = FLAT, WORSE, NO_ENTROPY, EQUAL_Q, SKIPPED, NO_GRADIENT, FLAT_GROUPS, ONE_RETURN

LEAST_EVALUATIONS = 3  # after that of the untrained weights
LEAST_SHARE = 0.2  # of the training's steps, before its scores are judged: warm-up is over
LEAST_QUESTIONS = 20  # of an evaluation; the interval of fewer is too wide to say anything
LEAST_STEPS = 20  # before the means of steps are judged
LEAST_LINES = 3  # of these means, likewise
LEAST_ENTROPY = 0.01  # nats: the likeliest of two actions then has more than 99.8 %
EQUAL = 1e-5  # of the largest Q: what float32 rounds, over a row of some hundred products
MOST_SKIPPED = 0.2  # share of the steps
MOST_FLAT = 0.95  # share of the groups
KEPT = 100  # lines
NORMAL_95 = 1.96  # standard errors on both sides of a mean


class Evaluated(NamedTuple):
    """One evaluation.

    Attributes:
        step: the step after which it was.
        score: the mean that chooses the best checkpoint.
        each: this score of each question that has one.
        q_spread: the largest difference, over all questions, between the best Q-values of the first
            step, over the largest |Q|; None: the policy has no Q, or one value of it is known.
    """

    step: int
    score: float
    each: Sequence[float] = ()
    q_spread: float | None = None


class Line(NamedTuple):
    """Means over some steps, as logged.

    Attributes:
        step: the last of the steps.
        steps: number of steps.
        means: by name: `entropy`, `grad_norm`, `flat_groups`, `return`, as far as the system has
            them; NaN if no step had a finite one.
    """

    step: int
    steps: int
    means: Mapping[str, float]


@dataclasses.dataclass
class Course:
    """What a start of a training has shown so far.

    Attributes:
        steps: number of steps of the whole training.
        evaluations: all of them, in order; a resumed run lacks the earlier ones.
        lines: the last `KEPT` of them.
        counted: steps of all lines so far.
        skipped: steps of these that learned nothing, because a number was not finite.
    """

    steps: int
    evaluations: list[Evaluated] = dataclasses.field(default_factory=list)
    lines: list[Line] = dataclasses.field(default_factory=list)
    counted: int = 0
    skipped: int = 0


class Finding(NamedTuple):
    """A sign that the training does not learn: one of `KINDS`, and what was measured."""

    kind: str
    measured: str


def findings(course: Course) -> list[Finding]:
    """All signs that the training does not learn; [] if there is none, or no evaluation yet."""
    if not course.evaluations:
        return []
    found = [*_of_scores(course), *_of_q(course), *_of_skipped(course)]
    if not _has_improved(course):  # a policy that has learned may be sure of itself
        found += _of_means(course)
    return sorted(found, key=lambda finding: KINDS.index(finding.kind))


def _first_interval(course: Course) -> tuple[float, float] | None:
    """The interval of the untrained weights' score; None: too little is known for a judgement."""
    first, *later = course.evaluations
    known = [value for value in first.each if math.isfinite(value)]
    if first.step != 0 or len(known) < LEAST_QUESTIONS or len(later) < LEAST_EVALUATIONS:
        return None
    if later[-1].step < LEAST_SHARE * course.steps:
        return None
    # Of the mean, by its standard error. The bootstrap of the scores' tables gives nearly the same
    # from 20 values on, but its library takes a second to import, which every start would pay.
    half = NORMAL_95 * float(np.std(known, ddof=1)) / math.sqrt(len(known))
    mean = float(np.mean(known))
    return mean - half, mean + half


def _of_scores(course: Course) -> Iterator[Finding]:
    if (interval := _first_interval(course)) is None:
        return
    (low, high), later = interval, [evaluation.score for evaluation in course.evaluations[1:]]
    last = later[-LEAST_EVALUATIONS:]
    scores = f"the last {len(last)} evaluations scored {', '.join(f'{x:.3f}' for x in last)}"
    first = (
        f"95 % interval of the untrained weights, {low:.3f} to {high:.3f} "
        f"({len(course.evaluations[0].each)} questions)"
    )
    if all(low <= score <= high for score in later):
        yield Finding(FLAT, f"{scores}, all {len(later)} so far within the {first}")
    if all(score < low for score in last):
        yield Finding(WORSE, f"{scores}, below the {first}")


def _of_q(course: Course) -> Iterator[Finding]:
    last = course.evaluations[-1]
    if last.step and last.q_spread is not None and last.q_spread <= EQUAL:
        yield Finding(
            EQUAL_Q,
            "the best Q-values of the first step are equal for every question of the last "
            f"evaluation (they differ by {last.q_spread:.1g} of the largest)",
        )


def _of_skipped(course: Course) -> Iterator[Finding]:
    steps, skipped = course.counted, course.skipped
    if steps >= LEAST_STEPS and skipped >= MOST_SKIPPED * steps:
        yield Finding(
            SKIPPED,
            f"{skipped} of {steps} steps ({skipped / steps:.0%}) learned nothing, because their "
            "loss or gradient was not finite",
        )


def _of_means(course: Course) -> Iterator[Finding]:
    """What the last lines of the log show."""
    lines = "the last {} lines of the log".format
    if (known := _last_means(course, "entropy")) and max(known) < LEAST_ENTROPY:
        value = f"{max(known):.2g} nats or less for {lines(len(known))}"
        yield Finding(
            NO_ENTROPY, f"the policy's entropy is {value}, and the score is no better than at first"
        )
    if (known := _last_means(course, "grad_norm")) and not any(known):
        yield Finding(NO_GRADIENT, f"the gradient is 0 in {lines(len(known))}")
    if (known := _last_means(course, "flat_groups")) and min(known) >= MOST_FLAT:
        yield Finding(
            FLAT_GROUPS,
            f"{min(known):.0%} or more of the groups have equal rewards in {lines(len(known))}, "
            "and such a group teaches nothing",
        )
    if (known := _last_means(course, "return")) and min(known) == max(known):
        value = f"exactly {known[0]:.4g} in each of {lines(len(known))}"
        yield Finding(ONE_RETURN, f"the mean return is {value}")


def _has_improved(course: Course) -> bool:
    """Whether the last score is above the first.

    A resumed run does not know its first score, so it is taken to have improved.
    """
    first, last = course.evaluations[0], course.evaluations[-1]
    interval = _first_interval(course)
    return first.step != 0 or last.score > (first.score if interval is None else interval[1])


def _last_means(course: Course, name: str) -> list[float]:
    """The last means of this name, which cover enough steps and lines; [] if there are too few."""
    found, steps = list[float](), 0
    for line in reversed(course.lines):
        value = line.means.get(name, math.nan)
        if not math.isfinite(value):
            return []  # another stage, or a line without any good step
        found.append(value)
        steps += line.steps
        if len(found) >= LEAST_LINES and steps >= LEAST_STEPS:
            return found[::-1]
    return []


class Watch:
    """Says each kind of finding once in a training of so many steps."""

    def __init__(self, steps: int) -> None:
        self._course, self._told = Course(steps), set[str]()

    def line(self, step: int, count: int, means: Mapping[str, float], skipped: int) -> None:
        """Takes the means of `count` steps, of which `skipped` learned nothing."""
        course = self._course
        course.lines.append(Line(step, count, dict(means)))
        del course.lines[:-KEPT]
        course.counted += count
        course.skipped += skipped

    def evaluated(self, evaluation: Evaluated) -> Iterator[str]:
        """Takes an evaluation, and gives one sentence for each sign that is seen first now."""
        self._course.evaluations.append(evaluation)
        for kind, measured in findings(self._course):
            if kind not in self._told:
                self._told.add(kind)
                yield (
                    f"step {evaluation.step}: the run may not be learning: {measured}; for likely "
                    f"causes see docs/troubles.md#{kind}"
                )

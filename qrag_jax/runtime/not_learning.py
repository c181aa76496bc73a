"""Finds signs that a training does not learn, from what it has logged so far.

Each rule looks at one number that a sound training does not show. A rule says what it measured, and
no rule stops a run. The likely causes are those of the system, see `systems.config`, and
docs/troubles.md says more about each of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    return [found for rule in _RULES if (found := rule(course)) is not None]


def _later_scores(course: Course) -> tuple[tuple[float, float], Sequence[Evaluated]] | None:
    """The interval of the untrained weights' score, and the evaluations after it.

    None: too little is known for a judgement.
    """
    if not course.evaluations or course.evaluations[0].step != 0:
        return None
    first, *later = course.evaluations
    known = [value for value in first.each if math.isfinite(value)]
    if len(known) < LEAST_QUESTIONS or len(later) < LEAST_EVALUATIONS:
        return None
    if later[-1].step < LEAST_SHARE * course.steps:
        return None
    # Of the mean, by its standard error. The bootstrap of the scores' tables gives nearly the same
    # from 20 values on, but its library takes a second to import, which every start would pay.
    half = NORMAL_95 * float(np.std(known, ddof=1)) / math.sqrt(len(known))
    mean = float(np.mean(known))
    return (mean - half, mean + half), later


def _interval_told(course: Course, interval: tuple[float, float]) -> str:
    low, high = interval
    count = len(course.evaluations[0].each)
    return f"95 % interval of the untrained weights, {low:.3f} to {high:.3f} ({count} questions)"


def _scores_told(later: Sequence[Evaluated]) -> str:
    scores = ", ".join(f"{each.score:.3f}" for each in later[-LEAST_EVALUATIONS:])
    return f"the last {LEAST_EVALUATIONS} evaluations scored {scores}"


def _flat(course: Course) -> Finding | None:
    if (known := _later_scores(course)) is None:
        return None
    interval, later = known
    if not all(interval[0] <= each.score <= interval[1] for each in later):
        return None
    inside = f"all {len(later)} so far within the {_interval_told(course, interval)}"
    return Finding(FLAT, f"{_scores_told(later)}, {inside}")


def _worse(course: Course) -> Finding | None:
    if (known := _later_scores(course)) is None:
        return None
    interval, later = known
    if not all(each.score < interval[0] for each in later[-LEAST_EVALUATIONS:]):
        return None
    return Finding(WORSE, f"{_scores_told(later)}, below the {_interval_told(course, interval)}")


def _has_improved(course: Course) -> bool:
    """Whether the last score is above the first; a policy that has learned may be sure of itself.

    A resumed run does not know its first score, so it is taken to have improved.
    """
    first, last = course.evaluations[0], course.evaluations[-1]
    if first.step != 0:
        return True
    known = _later_scores(course)
    return last.score > (first.score if known is None else known[0][1])


def _last_lines(course: Course, name: str) -> list[float] | None:
    """The last means of this name, which cover enough steps and lines; None: there are too few."""
    found, steps = list[float](), 0
    for line in reversed(course.lines):
        value = line.means.get(name, math.nan)
        if not math.isfinite(value):
            return None  # another stage, or a line without any good step
        found.append(value)
        steps += line.steps
        if len(found) >= LEAST_LINES and steps >= LEAST_STEPS:
            return found[::-1]
    return None


def _no_entropy(course: Course) -> Finding | None:
    entropies = _last_lines(course, "entropy")
    if entropies is None or max(entropies) >= LEAST_ENTROPY or _has_improved(course):
        return None
    value = f"{max(entropies):.2g} nats or less for the last {len(entropies)} lines of the log"
    return Finding(
        NO_ENTROPY, f"the policy's entropy is {value}, and the score is no better than at first"
    )


def _equal_q(course: Course) -> Finding | None:
    last = course.evaluations[-1]
    if not last.step or last.q_spread is None or last.q_spread > EQUAL:
        return None
    return Finding(
        EQUAL_Q,
        "the best Q-values of the first step are equal for every question of the last evaluation "
        f"(they differ by {last.q_spread:.1g} of the largest)",
    )


def _skipped(course: Course) -> Finding | None:
    steps = course.counted
    if steps < LEAST_STEPS or course.skipped < MOST_SKIPPED * steps:
        return None
    share = course.skipped / steps
    return Finding(
        SKIPPED,
        f"{course.skipped} of {steps} steps ({share:.0%}) learned nothing, because their loss or "
        "gradient was not finite",
    )


def _no_gradient(course: Course) -> Finding | None:
    norms = _last_lines(course, "grad_norm")
    if norms is None or any(norms) or _has_improved(course):
        return None
    return Finding(NO_GRADIENT, f"the gradient is 0 in the last {len(norms)} lines of the log")


def _flat_groups(course: Course) -> Finding | None:
    shares = _last_lines(course, "flat_groups")
    if shares is None or min(shares) < MOST_FLAT or _has_improved(course):
        return None
    return Finding(
        FLAT_GROUPS,
        f"{min(shares):.0%} or more of the groups have equal rewards in the last {len(shares)} "
        "lines of the log, and such a group teaches nothing",
    )


def _one_return(course: Course) -> Finding | None:
    returns = _last_lines(course, "return")
    if returns is None or min(returns) != max(returns) or _has_improved(course):
        return None
    return Finding(
        ONE_RETURN,
        f"the mean return is exactly {returns[0]:.4g} in each of the last {len(returns)} lines of "
        "the log",
    )


_RULES: tuple[Callable[[Course], Finding | None], ...] = (
    *(_flat, _worse, _no_entropy, _equal_q),
    *(_skipped, _no_gradient, _flat_groups, _one_return),
)


class Watch:
    """Says each kind of finding once, with its likely causes.

    Args:
        steps: number of steps of the whole training.
        causes: what to look at, by kind of finding.
    """

    def __init__(self, steps: int, causes: Mapping[str, str]) -> None:
        self._course, self._causes, self._told = Course(steps), causes, set[str]()

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
                causes = self._causes.get(kind)
                likely = f"; likely causes: {causes}" if causes else ""
                yield (
                    f"step {evaluation.step}: the run may not be learning: {measured}{likely}; see "
                    f"docs/troubles.md#{kind}"
                )

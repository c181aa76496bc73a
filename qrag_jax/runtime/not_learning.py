"""Finds signs that a training does not learn, from what it has logged so far.

Each rule looks at one number that a sound training does not show, and no rule stops a run.
docs/troubles.md has the likely causes.
"""

from __future__ import annotations

import math
from collections import deque
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
    """One evaluation."""

    step: int  # after which it was
    score: float  # the mean that chooses the best checkpoint
    each: Sequence[float] = ()  # this score of each question that has one
    # The largest difference, over all questions, between the best Q-values of the first step, over
    # the largest |Q|; None: the policy has no Q, or one value of it is known.
    q_spread: float | None = None


class Watch:
    """What a start of a training has shown so far; says each kind of finding once.

    Attributes:
        evaluations: all of them, in order; a resumed run lacks the earlier ones.
        lines: the last `KEPT` of them, each a number of steps and the means over these: `entropy`,
            `grad_norm`, `flat_groups`, `return`, as far as the system has them.
        counted: steps of all lines so far.
        skipped: steps of these that learned nothing, because a number was not finite.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._said = steps, set[str]()
        self.evaluations: list[Evaluated] = []
        self.lines: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=KEPT)
        self.counted = self.skipped = 0

    def line(self, count: int, means: Mapping[str, float], skipped: int) -> None:
        """Takes the means of `count` steps, of which `skipped` learned nothing."""
        self.lines.append((count, dict(means)))
        self.counted += count
        self.skipped += skipped

    def evaluated(self, evaluation: Evaluated) -> Iterator[str]:
        """Takes an evaluation, and gives one sentence for each sign that is seen first now."""
        self.evaluations.append(evaluation)
        for kind, measured in self.findings():
            if kind not in self._said:
                self._said.add(kind)
                yield (
                    f"step {evaluation.step}: the run may not be learning: {measured}; for likely "
                    f"causes see docs/troubles.md#{kind}"
                )

    def findings(self) -> list[tuple[str, str]]:
        """All signs that the training does not learn: one of `KINDS`, and what was measured."""
        if not self.evaluations:
            return []
        first, last = self.evaluations[0], self.evaluations[-1]
        interval = self._first_interval()
        found = [*self._of_scores(*interval)] if interval else []
        if last.step and last.q_spread is not None and last.q_spread <= EQUAL:
            text = "the best Q-values of the first step are equal for every question of the last "
            text += f"evaluation (they differ by {last.q_spread:.1g} of the largest)"
            found.append((EQUAL_Q, text))
        if self.counted >= LEAST_STEPS and self.skipped >= MOST_SKIPPED * self.counted:
            share = f"{self.skipped} of {self.counted} steps ({self.skipped / self.counted:.0%})"
            why = "learned nothing, because their loss or gradient was not finite"
            found.append((SKIPPED, f"{share} {why}"))
        # A policy that has learned may be sure of itself. A resumed run does not know its first
        # score, so it is taken to have learned.
        if first.step == 0 and last.score <= (interval[1] if interval else first.score):
            found += self._of_means()
        return sorted(found, key=lambda finding: KINDS.index(finding[0]))

    def _first_interval(self) -> tuple[float, float] | None:
        """That of the untrained weights' score; None: too little is known for a judgement."""
        first, *later = self.evaluations
        known = [value for value in first.each if math.isfinite(value)]
        if first.step != 0 or len(known) < LEAST_QUESTIONS or len(later) < LEAST_EVALUATIONS:
            return None
        if later[-1].step < LEAST_SHARE * self._steps:
            return None
        # Of the mean, by its standard error. The bootstrap of the scores' tables gives nearly the
        # same from 20 values on, but its library takes a second to import.
        half = NORMAL_95 * float(np.std(known, ddof=1)) / math.sqrt(len(known))
        mean = float(np.mean(known))
        return mean - half, mean + half

    def _of_scores(self, low: float, high: float) -> Iterator[tuple[str, str]]:
        later = [evaluation.score for evaluation in self.evaluations[1:]]
        last = later[-LEAST_EVALUATIONS:]
        scores = f"the last {len(last)} evaluations scored {', '.join(f'{x:.3f}' for x in last)}"
        first = (
            f"95 % interval of the untrained weights, {low:.3f} to {high:.3f} "
            f"({len(self.evaluations[0].each)} questions)"
        )
        if all(low <= score <= high for score in later):
            yield FLAT, f"{scores}, all {len(later)} so far within the {first}"
        if all(score < low for score in last):
            yield WORSE, f"{scores}, below the {first}"

    def _of_means(self) -> Iterator[tuple[str, str]]:
        """What the last lines of the log show."""
        lines = "the last {} lines of the log".format
        if (known := self._last_means("entropy")) and max(known) < LEAST_ENTROPY:
            value = f"{max(known):.2g} nats or less for {lines(len(known))}"
            text = f"the policy's entropy is {value}, and the score is no better than at first"
            yield NO_ENTROPY, text
        if (known := self._last_means("grad_norm")) and not any(known):
            yield NO_GRADIENT, f"the gradient is 0 in {lines(len(known))}"
        if (known := self._last_means("flat_groups")) and min(known) >= MOST_FLAT:
            share = f"{min(known):.0%} or more of the groups have equal rewards"
            yield FLAT_GROUPS, f"{share} in {lines(len(known))}, and such a group teaches nothing"
        if (known := self._last_means("return")) and min(known) == max(known):
            value = f"exactly {known[0]:.4g} in each of {lines(len(known))}"
            yield ONE_RETURN, f"the mean return is {value}"

    def _last_means(self, name: str) -> list[float]:
        """The last means, which cover enough steps and lines; [] if there are too few."""
        found, steps = list[float](), 0
        for count, means in reversed(self.lines):
            value = means.get(name, math.nan)
            if not math.isfinite(value):
                return []  # another stage, or a line without any good step
            found.append(value)
            steps += count
            if len(found) >= LEAST_LINES and steps >= LEAST_STEPS:
                return found[::-1]
        return []

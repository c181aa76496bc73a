"""Estimates how long a training still takes, from the seconds of its steps and evaluations."""

from __future__ import annotations

import dataclasses
import math

GROUP_STEPS = 5  # measured together
GROUP_SECONDS = 2.0  # likewise, at least: shorter times are mostly noise
OTHER_PACE = 2.0  # steps this much slower or faster are told again
MOST_TOLD = 5  # times


@dataclasses.dataclass
class TimeLeft:
    """Says what is left after the first steps, and again if later steps take another time.

    Steps of another stage do: a language model that imitates is faster than one that plays.

    Attributes:
        steps: number of steps of the whole training.
        every: steps between evaluations.
        evaluating: seconds of the longest evaluation so far; None: there was none yet.
    """

    steps: int
    every: int
    evaluating: float | None = None
    _count: int = 0
    _seconds: float = 0.0
    _told: float | None = None  # seconds of a step
    _times: int = 0

    def evaluated(self, seconds: float) -> None:
        """Takes the seconds of an evaluation, without those of compiling."""
        self.evaluating = max(self.evaluating or 0.0, seconds)

    def stepped(self, step: int, seconds: float) -> str | None:
        """Takes the seconds of a step, without those of compiling; gives a line if there is news.

        Args:
            step: number of steps done so far.
        """
        self._count += 1
        self._seconds += seconds
        if self._count < GROUP_STEPS or self._seconds < GROUP_SECONDS:
            return None
        each, self._count, self._seconds = self._seconds / self._count, 0, 0.0
        if self._told is not None and 1 / OTHER_PACE < each / self._told < OTHER_PACE:
            return None
        if step >= self.steps or self._times >= MOST_TOLD:
            return None
        self._told, self._times = each, self._times + 1
        return self._line(step, each)

    def _line(self, step: int, each: float) -> str:
        left = self.steps - step
        evaluations = math.ceil(self.steps / self.every) - step // self.every
        scored = evaluations * (self.evaluating or 0.0)
        told = f"about {duration(left * each + scored)} left: {left} steps of {duration(each)}"
        if self.evaluating is None:
            return f"{told}, and {evaluations} evaluations"
        return f"{told}, {evaluations} evaluations of {duration(self.evaluating)}"


def duration(seconds: float) -> str:
    """A time as text for people: "0.25 s", "45 s", "12 min", "3.4 h"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"

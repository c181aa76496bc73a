"""What each training had reached at equal cost, on the questions for choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.report import markdown
from benchmarks.which_cases.found import Course, Training
from benchmarks.which_cases.row import TRAINED
from benchmarks.which_cases.settings import SETTINGS
from benchmarks.which_cases.table import Scored, cost_cell

MINUTES = (2.5, 5.0, 10.0, 20.0, 40.0)  # of the processors
_ALREADY = 0.9  # share of a training's minutes


def tables(lines: Sequence[Scored]) -> Iterator[str]:
    """A section in Markdown for each setting in which something was trained."""
    for where in SETTINGS:
        own = [line for line in lines if line.trained_in == where and line.way == TRAINED]
        rows = [_cells(line) for line in own if any(each.course for each in line.training)]
        if rows:
            header = ["row", "score", "first score", *(f"{m:g} minutes" for m in MINUTES)]
            header += ["at the end", "its minutes", "best after"]
            yield (
                f"### {where}: what a training has reached at equal cost\n\n"
                "The best score so far on the questions for choices, after so many processor "
                "minutes, mean over the trainings. The scores are different ones, of each system's "
                "own search, so compare them along a line. The last column is the share of the "
                f"minutes after which the best was found: {_ALREADY:g} or more may have been "
                "learning still.\n\n" + markdown(header, rows)
            )


def _cells(line: Scored) -> list[str]:
    runs = [(each, each.course) for each in line.training if each.course]
    courses = [course for _, course in runs if course]
    cells = [_mean([course.points[0][1] for course in courses])]
    for minutes in MINUTES:
        cells.append(_mean([_reached(*run, minutes) for run in runs if run[1]]))
    ends = [max(score for _, score in course.points) for course in courses]
    total = [training.cpu_minutes for training, _ in runs]
    when = [_best_after(training, course) for training, course in runs if course]
    found = [cost_cell(total), f"{np.mean(when):.2f}"]
    return [line.title, courses[0].measure, *cells, _mean(ends), *found]


def _reached(training: Training, course: Course | None, minutes: float) -> float | None:
    """None: it has no score yet, or has ended."""
    assert course is not None
    so_far = [score for when, score in course.points if when <= minutes]
    return max(so_far) if so_far and minutes <= training.cpu_minutes else None


def _best_after(training: Training, course: Course) -> float:
    best = max(score for _, score in course.points)
    first = next(when for when, score in course.points if score == best)
    return first / training.cpu_minutes


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3f}" if known and len(known) == len(values) else ""

"""A setting of the suite which, of invented questions."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.which_cases import invented
from benchmarks.which_cases.found import Training
from benchmarks.which_cases.invented import Sizes
from benchmarks.which_cases.settings import TWO_WIKI, Setting, setting


def make(folder: Path, sizes: Sizes | None = None, *, without_gold_of: int = 0) -> Setting:
    """Writes the data and the setting `2wiki` of them; returns the setting.

    Args:
        folder: of both.
        sizes: numbers of questions and passages.
        without_gold_of: test questions of which the corpus lacks a gold passage.
    """
    invented.write(folder / "data", sizes or Sizes(), without_gold_of=without_gold_of)
    return setting(TWO_WIKI, folder / "data", folder / TWO_WIKI)


def check_course(training: Training) -> None:
    """A row's training has scores on the questions for choices, within its minutes."""
    assert training.course is not None
    minutes = [when for when, _ in training.course.points]
    assert minutes == sorted(minutes)
    assert 0.0 <= minutes[0] <= minutes[-1] <= training.cpu_minutes + 1e-9
    assert all(math.isfinite(score) for _, score in training.course.points)

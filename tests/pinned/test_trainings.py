"""Tiny trainings of every system have the numbers that they had when these were pinned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pinned.trainings import TRAININGS, VALUES, differences, processor, run

# Of the largest value of a metric. On one kind of processor all numbers have been equal to the last
# bit so far. Others round otherwise, and what rounding does grows until an action flips: there the
# first values are compared alone, of which one flip changes a mean by 0.03 or more.
TOLERANCE, ELSEWHERE = (2e-3, None), (2e-2, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAININGS)
def test_numbers_of_training(name: str, tmp_path: Path) -> None:
    stored = json.loads(VALUES.read_text())
    tolerance = TOLERANCE if stored["processor"] == processor() else ELSEWHERE
    found = list(differences(run(name, tmp_path / "run"), stored["trainings"][name], *tolerance))
    assert not found, "\n".join([*found, "if this is meant: make pin"])


def test_differences_are_seen() -> None:
    one = {"train/loss": [1.0, 0.5], "train/return": [0.25, None]}
    assert not list(differences(one, one, *TOLERANCE))
    for other in (
        {"train/loss": [1.0, 0.51], "train/return": [0.25, None]},
        {"train/loss": [1.0], "train/return": [0.25, None]},
        {"train/loss": [1.0, 0.5]},
        {"train/loss": [1.0, float("nan")], "train/return": [0.25, None]},
        {"train/loss": [1.0, 0.5], "train/return": [0.25, 0.0]},
    ):
        assert len(list(differences(one, other, *TOLERANCE))) == 1

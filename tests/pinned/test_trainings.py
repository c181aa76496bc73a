"""Tiny trainings of every system have the numbers that they had when these were pinned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pinned.trainings import TRAININGS, VALUES, differences, run

# Of the largest value of a metric. Processors and compilers differ by rounding, whose effect grows
# from step to step. An action that flips changes a mean reward by at least 0.03.
TOLERANCE = 2e-3


@pytest.mark.parametrize("name", TRAININGS)
def test_numbers_of_training(name: str, tmp_path: Path) -> None:
    pinned = json.loads(VALUES.read_text())[name]
    found = list(differences(run(name, tmp_path / "run"), pinned, TOLERANCE))
    assert not found, "\n".join([*found, "if this is meant: make pin"])


def test_differences_are_seen() -> None:
    one = {"train/loss": [1.0, 0.5], "train/return": [0.25]}
    assert not list(differences(one, one, TOLERANCE))
    for other in (
        {"train/loss": [1.0, 0.51], "train/return": [0.25]},
        {"train/loss": [1.0], "train/return": [0.25]},
        {"train/loss": [1.0, 0.5]},
        {"train/loss": [1.0, float("nan")], "train/return": [0.25]},
    ):
        assert len(list(differences(one, other, TOLERANCE))) == 1

"""Vectors, rankings, rewards and tiny trainings have the numbers that were pinned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import environment_of
from tests.pinned.pins import PIECES, TRAININGS, VALUES, Numbers, differences, processor

# Of the largest value of a metric. On one kind of processor all numbers have been equal to the last
# bit so far. Others round otherwise, and what rounding does grows until an action flips: there the
# first values are compared alone, of which one flip changes a mean by 0.03 or more.
TOLERANCE, ELSEWHERE = (2e-3, None), (2e-2, 2)


def check(name: str, numbers: Numbers) -> None:
    stored = json.loads(VALUES.read_text())
    tolerance = TOLERANCE if stored["processor"] == processor() else ELSEWHERE
    changed = list(differences(numbers, stored["numbers"][name], *tolerance))
    assert not changed, "\n".join([*changed, f"if this is meant: make pin ARGS={name}"])


@pytest.mark.parametrize("name", PIECES)
def test_numbers_of_pieces(name: str, tmp_path: Path) -> None:
    check(name, PIECES[name](tmp_path))


# Trainings were pinned on one device: the sums of several round otherwise, which flips a token.
ALONE = """
import json, pathlib, sys
from tests.pinned.pins import TRAININGS
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
numbers = TRAININGS[name](folder / "run")
(folder / "numbers.json").write_text(json.dumps(numbers))
"""


@pytest.mark.parametrize("name", TRAININGS)
def test_numbers_of_trainings(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", ALONE, name, str(tmp_path)]
    ended = subprocess.run(words, env=environment_of(1), capture_output=True, text=True)
    assert not ended.returncode, ended.stderr[-3000:]
    check(name, json.loads((tmp_path / "numbers.json").read_text()))


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

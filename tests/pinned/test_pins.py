"""Vectors, rankings, rewards and tiny trainings have the numbers that were pinned."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
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


@pytest.fixture(scope="module")
def one_device() -> Iterator[ProcessPoolExecutor]:
    """A process with one device, on which trainings were pinned.

    The sums of several round otherwise, which flips a token.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment_of(1).items():
                patch.setenv(name, value)
            pool.submit(os.getpid).result()
        yield pool


@pytest.mark.parametrize("name", TRAININGS)
def test_numbers_of_trainings(name: str, one_device: ProcessPoolExecutor, tmp_path: Path) -> None:
    check(name, one_device.submit(TRAININGS[name], tmp_path / "run").result())

"""How long a training still takes, from the seconds of its steps and evaluations."""

from __future__ import annotations

import pytest

from qrag_jax.runtime.time_left import TimeLeft, duration


def told(left: TimeLeft, seconds: float, first: int, last: int) -> list[str]:
    lines = (left.stepped(step, seconds) for step in range(first, last + 1))
    return [line for line in lines if line is not None]


def test_steps_and_evaluations_that_are_left_are_told_once() -> None:
    left = TimeLeft(400, 100)
    left.evaluated(30.0)
    assert told(left, 1.5, 2, 300) == [
        "about 12 min left: 394 steps of 1.5 s, 4 evaluations of 30 s"
    ]


def test_the_last_step_is_evaluated_though_it_is_no_multiple() -> None:
    left = TimeLeft(250, 100)
    left.evaluated(10.0)
    (line,) = told(left, 1.0, 106, 110)
    assert line == "about 3 min left: 140 steps of 1 s, 2 evaluations of 10 s"


def test_short_steps_are_measured_longer() -> None:
    left = TimeLeft(1000, 1000)
    assert told(left, 0.125, 2, 16) == []
    assert told(left, 0.125, 17, 17) == ["about 2 min left: 983 steps of 0.12 s, and 1 evaluations"]


def test_another_pace_is_told_again() -> None:
    left = TimeLeft(100, 100)
    assert len(told(left, 1.0, 2, 21)) == 1
    (line,) = told(left, 10.0, 22, 60)
    assert "steps of 1" in line
    assert told(left, 10.0, 61, 80) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.123, "0.12 s"), (89, "89 s"), (90, "2 min"), (720, "12 min"), (5400, "1.5 h")],
)
def test_times_have_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text

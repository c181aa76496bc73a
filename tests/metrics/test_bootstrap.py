from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from qrag_jax.metrics.bootstrap import (
    columns_text,
    crossed_interval,
    interval_text,
    mean_interval,
    paired_interval,
)


def test_same_seed_same_interval_other_seed_another() -> None:
    values = np.random.default_rng(3).random(40)
    assert mean_interval(values, seed=1) == mean_interval(values, seed=1)
    assert mean_interval(values, seed=1) != mean_interval(values, seed=2)


def test_interval_agrees_with_the_normal_one_for_many_values() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, size=2000)
    mean, low, high = mean_interval(values)
    error = values.std() / math.sqrt(values.size)
    assert mean == pytest.approx(values.mean())
    assert low == pytest.approx(mean - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.15 * error)


@pytest.mark.parametrize(("level", "least", "most"), [(0.95, 0.90, 0.975), (0.5, 0.42, 0.58)])
def test_the_interval_holds_the_true_mean_as_often_as_it_says(
    level: float, least: float, most: float
) -> None:
    # 500 experiments of 60 coin throws with p = 0.3: the share of intervals that hold 0.3 has a
    # standard error of about 0.01 (level 0.95) or 0.022 (level 0.5).
    rng = np.random.default_rng(7)
    held = 0
    for trial in range(500):
        throws = (rng.random(60) < 0.3).astype(float)
        _, low, high = mean_interval(throws, level, resamples=400, seed=trial)
        held += low <= 0.3 <= high
    assert least <= held / 500 <= most


def test_one_value_and_equal_values_give_no_width() -> None:
    assert mean_interval([0.7]) == (0.7, 0.7, 0.7)
    assert mean_interval([0.1] * 1001) == (0.1, 0.1, 0.1)


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(5).random(100)
    whole = mean_interval(values, resamples=500)
    monkeypatch.setattr("qrag_jax.metrics.bootstrap._BLOCK", 700)
    assert mean_interval(values, resamples=500) == whole


def test_memory_stays_small_for_many_values() -> None:
    values = np.random.default_rng(5).random(100_000)
    tracemalloc.start()
    mean_interval(values, resamples=200)  # at once, the draws alone would take 320 MB
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6


def test_pairs_cancel_what_both_share() -> None:
    rng = np.random.default_rng(1)
    hard = rng.normal(0.0, 5.0, size=200)
    ours, theirs = hard + 0.3 + rng.normal(0, 0.5, 200), hard + rng.normal(0, 0.5, 200)
    mean, low, high = paired_interval(ours, theirs)
    assert mean == pytest.approx(ours.mean() - theirs.mean())
    assert 0.0 < low < 0.3 < high
    apart = mean_interval(ours)[2] - mean_interval(ours)[1]
    assert high - low < apart / 4


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="least one value"):
        mean_interval([])
    with pytest.raises(ValueError, match="NaN or infinite"):
        mean_interval([1.0, math.nan])
    with pytest.raises(ValueError, match="level"):
        mean_interval([1.0], level=95.0)
    with pytest.raises(ValueError, match="resamples"):
        mean_interval([1.0], resamples=0)
    with pytest.raises(ValueError, match="equal lengths"):
        paired_interval([1.0], [1.0, 2.0])


def test_intervals_as_text() -> None:
    interval = {"mean": 0.8124, "low": -0.01, "high": 1.0}
    assert interval_text(interval) == "0.812 [-0.010, 1.000]"
    assert interval_text(interval, sign=True) == "+0.812 [-0.010, +1.000]"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = [["", "f1", "steps"], ["no stopping", "0.5", "1"], ["x", "0.25", ""]]
    assert columns_text(lines) == [
        "             f1    steps",
        "no stopping  0.5   1",
        "x            0.25",
    ]
    with pytest.raises(ValueError):
        columns_text([["a"], ["b", "c"]])


def test_one_training_is_the_bootstrap_over_questions() -> None:
    values = np.random.default_rng(0).random((1, 50))
    assert crossed_interval(values, seed=3) == mean_interval(values[0], seed=3)


def test_equal_values_have_no_width() -> None:
    assert crossed_interval(np.full((3, 4), 0.25)) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(("of_trainings", "of_questions"), [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_the_width_is_that_of_both_sources(of_trainings: float, of_questions: float) -> None:
    """Var = σ²_trainings / rows + σ²_questions / columns, where rows and columns add up."""
    draws = np.random.default_rng(1)
    trainings = draws.normal(0, of_trainings, (40, 1))
    questions = draws.normal(0, of_questions, (1, 200))
    mean, low, high = crossed_interval(trainings + questions, resamples=4000)
    error = math.sqrt(trainings.var() / 40 + questions.var() / 200)
    assert mean == pytest.approx(float((trainings + questions).mean()))
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_many_questions_are_drawn_in_blocks() -> None:
    values = np.random.default_rng(2).random((2, 3_000_000))
    _, low, high = crossed_interval(values, resamples=3)
    assert 0.49 < low <= high < 0.51


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.zeros((0, 3)), "table of trainings"),
        (np.zeros(3), "table of trainings"),
        (np.array([[1.0, math.nan], [1.0, 1.0]]), "NaN or infinite"),
    ],
)
def test_what_is_refused(values: np.ndarray, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        crossed_interval(values)


def test_level_and_resamples_are_checked() -> None:
    values = np.array([[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="level"):
        crossed_interval(values, level=1.0)
    with pytest.raises(ValueError, match="resamples"):
        crossed_interval(values, resamples=0)

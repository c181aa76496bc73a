"""The bootstrap over trainings and questions at once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qrag_jax.metrics.bootstrap import crossed_interval, mean_interval


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
        (np.zeros((0, 3)), "a table of trainings"),
        (np.zeros(3), "a table of trainings"),
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

"""The sweep over thresholds against filtering every row anew at each of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.chunk_filters import qvalue
from qrag_jax.metrics.facts import fact_columns
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.metrics.stop_threshold import OBJECTIVES, choose, sweep


def row(sf_idx: list[int], pred_idx: list[int], q_values: list[float], name: str = "q") -> Row:
    texts = ["text"] * len(pred_idx)
    return Row(
        name, "?", "", sf_idx, pred_idx, q_values, ["fact"] * len(sf_idx), texts, 0.0, 1, 0.0, 0.0
    )


def random_rows(seed: int, count: int, ties: bool) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        steps = int(rng.integers(0, 7))  # rows that stopped at once, too
        q = rng.normal(0.5, 0.3, size=steps) - 0.1 * np.arange(steps)
        q = np.round(q, 1) if ties else q.astype(np.float32)
        taken = rng.permutation(8)[:steps].tolist()
        facts = rng.permutation(8)[: rng.integers(1, 4)].tolist()
        rows.append(row(facts, taken, q.tolist()))
    return rows


def by_hand(rows: list[Row], threshold: float) -> dict[str, float]:
    columns = fact_columns([qvalue(row, threshold) for row in rows])
    return {name: float(np.mean(values)) for name, values in columns.items()}


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_score_is_that_of_the_rows_cut_at_the_threshold(seed: int, ties: bool) -> None:
    rows = random_rows(seed, 40, ties)
    result = sweep(rows)
    assert (np.diff(result.thresholds) < 0).all()
    assert set(result.scores) == {*OBJECTIVES, "steps"}
    for k, threshold in enumerate(result.thresholds):
        expected = by_hand(rows, threshold)
        assert {name: values[k] for name, values in result.scores.items()} == pytest.approx(
            expected, abs=1e-12
        )


@pytest.mark.parametrize("ties", [True, False])
def test_no_threshold_at_all_does_better_than_the_chosen_one(ties: bool) -> None:
    rows = random_rows(11, 40, ties)
    result = sweep(rows)
    q = np.array([value for row in rows for value in row.q_values])
    # At each Q, just below and above it, between them, and beyond both ends.
    grid = np.unique([*q, *np.nextafter(q, -9), *np.nextafter(q, 9), *np.linspace(-2, 3, 100)])
    scores = [by_hand(rows, threshold) for threshold in grid]
    for objective in OBJECTIVES:
        best = choose(result.scores[objective], result.scores["steps"])
        top = max(score[objective] for score in scores)
        fewest = min(score["steps"] for score in scores if score[objective] >= top - 1e-12)
        assert result.scores[objective][best] == pytest.approx(top, abs=1e-12)
        assert result.scores["steps"][best] == pytest.approx(fewest)


def test_candidates_lie_between_running_minima_and_half_a_gap_beyond_them() -> None:
    # 0.75 comes after 0.5, where play has stopped: it decides nothing.
    rows = [row([0], [0, 1, 2], [1.0, 0.5, 0.75]), row([1], [2, 1], [0.5, 0.0])]
    result = sweep(rows)
    np.testing.assert_array_equal(result.thresholds, [1.25, 0.75, 0.25, -0.25])
    np.testing.assert_array_equal(result.scores["steps"], [0.0, 0.5, 2.0, 2.5])
    np.testing.assert_array_equal(result.scores["fact_recall"], [0.0, 0.5, 0.5, 1.0])
    np.testing.assert_allclose(result.scores["fact_f1"], [0, 1 / 2, 1 / 4, (1 / 2 + 2 / 3) / 2])


def test_one_value_has_a_threshold_on_either_side() -> None:
    result = sweep([row([0], [0], [0.25])])
    assert result.thresholds[0] > 0.25 > result.thresholds[1]
    np.testing.assert_array_equal(result.scores["fact_f1"], [0.0, 1.0])


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_neighbouring_numbers_are_told_apart_by_a_device_too(kind: type) -> None:
    low = kind(0.7)
    high = np.nextafter(low, kind(1.0))
    rows = [row([0], [0], [float(high)]), row([1], [0], [float(low)])]
    result = sweep(rows)
    best = choose(result.scores["fact_f1"], result.scores["steps"])
    threshold = result.thresholds[best]
    assert kind(threshold) < high
    assert kind(threshold) >= low
    assert by_hand(rows, threshold)["steps"] == 0.5


def test_equal_scores_go_to_the_fewest_steps() -> None:
    assert choose([0.5, 0.7, 0.7, 0.6], [1.0, 3.0, 2.0, 0.0]) == 2
    assert choose([0.1 + 0.2, 0.3], [2.0, 1.0]) == 1  # equal but for rounding
    assert choose([0.3 + 1e-8, 0.3], [2.0, 1.0]) == 0
    rows = [row([0], [0, 1], [0.9, 0.1])]  # recall is 1 from the first step on
    result = sweep(rows)
    assert choose(result.scores["fact_recall"], result.scores["steps"]) == 1


def test_refusals() -> None:
    with pytest.raises(InputError, match="threshold to tune"):
        sweep([])
    with pytest.raises(InputError, match="threshold to tune"):
        sweep([row([0], [], []), row([1], [], [])])
    broken = dataclasses.replace(row([0], [0, 1], [0.5, 0.4], "musique-3"), q_values=[])
    with pytest.raises(InputError, match="musique-3 has 0"):
        sweep([row([0], [0], [0.5]), broken])

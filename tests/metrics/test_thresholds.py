"""The sweep over thresholds against filtering at every threshold there can be."""

from __future__ import annotations

import numpy as np
import pytest

from qrag_jax.metrics.chunk_filters import filter_chunks
from qrag_jax.metrics.facts import summarise
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.metrics.thresholds import OBJECTIVES, sweep


def random_rows(seed: int, count: int, digits: int = 1) -> list[Row]:
    """Rows of 0 to 5 steps; few digits, so that many values of Q are equal."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        steps = int(rng.integers(0, 6))
        taken = rng.permutation(8)[:steps].tolist()
        q = np.round(rng.random(steps), digits).tolist()
        support = sorted(rng.permutation(8)[: rng.integers(1, 4)].tolist())
        texts = ["t"] * steps
        facts = ["f"] * len(support)
        rows.append(Row(str(number), "?", "", support, taken, q, facts, texts, 0.0, 1, 0.0, 0.0))
    return rows


@pytest.mark.parametrize("digits", [1, 6])
def test_every_threshold_scores_as_the_filter_does(digits) -> None:
    rows = random_rows(0, 40, digits)
    found = sweep(rows)
    assert found.thresholds[0] == -np.inf
    assert (np.diff(found.thresholds) > 0).all()
    for place, threshold in enumerate(found.thresholds):
        scores = summarise([filter_chunks("qvalue", row, float(threshold)) for row in rows])
        for name in (*OBJECTIVES, "steps"):
            assert getattr(found, name)[place] == pytest.approx(scores[name]["mean"]), name


def test_no_threshold_in_between_does_better() -> None:
    rows = random_rows(1, 40)
    found = sweep(rows)
    best = found.fact_f1[found.best("fact_f1")]
    tried = [
        np.mean([filter_chunks("qvalue", row, value).f1 for row in rows])
        for value in np.linspace(-0.1, 1.1, 241)
    ]
    assert best == pytest.approx(max(tried))


def test_of_equal_scores_the_fewest_steps_win() -> None:
    # The second step finds nothing: stopping before it, or not at all, has the same recall.
    one = Row("a", "?", "", [1], [1, 2], [0.9, 0.2], ["f"], ["t", "t"], 1.0, 1, 0.0, 0.0)
    found = sweep([one])
    assert found.thresholds.tolist() == [-np.inf, pytest.approx(0.55), 0.9]
    assert found.fact_recall.tolist() == [1, 1, 0]
    assert found.best("fact_recall") == 1


def test_rows_without_steps_and_no_rows() -> None:
    nothing = Row("a", "?", "", [1], [], [], ["f"], [], 0.0, 1, 0.0, 0.0)
    assert sweep([nothing]).steps.tolist() == [0]
    with pytest.raises(ValueError, match="at least one row"):
        sweep([])

"""Hits in order: by score, then by number."""

import numpy as np

from qrag_jax.retrieval.protocol import NONE
from qrag_jax.retrieval.ranking import as_hits, best, ranked

INF = np.inf


def test_the_best_come_first_and_the_lowest_of_equals() -> None:
    numbers = np.array([[7, 2, NONE, 9, 4], [3, NONE, NONE, 1, NONE]])
    scores = np.array([[1.0, 2.0, 99.0, 2.0, -0.0], [0.0, 1.0, 2.0, -0.0, 3.0]])
    hits = ranked(numbers, scores, 3)
    assert hits.numbers.tolist() == [[2, 9, 7], [1, 3, NONE]]
    assert hits.scores.tolist() == [[2.0, 2.0, 1.0], [0.0, 0.0, -INF]]
    assert (hits.numbers.dtype, hits.scores.dtype) == (np.int64, np.float32)


def test_too_few_are_filled_up() -> None:
    hits = ranked(np.array([[5]]), np.array([[0.5]]), 3)
    assert hits.numbers.tolist() == [[5, NONE, NONE]]
    assert hits.scores.tolist() == [[0.5, -INF, -INF]]


def test_row_by_row_and_all_at_once_are_the_same() -> None:
    rng = np.random.default_rng(0)
    numbers = np.stack([rng.permutation(200)[:50] for _ in range(20)])
    scores = rng.integers(0, 6, numbers.shape).astype(np.float64)
    for k in (1, 7, 50, 60):
        rows = [best(own, values, k) for own, values in zip(numbers, scores, strict=True)]
        for one, other in zip(as_hits(rows, k), ranked(numbers, scores, k), strict=True):
            np.testing.assert_array_equal(one, other)

"""Positions over an index are those of the trainer's formulas."""

from __future__ import annotations

import numpy as np
import pytest

from qrag_jax.retrieval import scan as scanning
from qrag_jax.retrieval.chunk_positions import Placement, intervals, rotated
from qrag_jax.retrieval.exact import ENGINE
from qrag_jax.retrieval.protocol import NONE, Queries
from qrag_jax.retrieval.scan import EXACT, ScanIndex, scan
from tests import reference
from tests.retrieval.array_index import of_texts
from tests.retrieval.conformance import OF_VECTORS, Engine, run_with
from tests.retrieval.saved_vectors import save_exact

WIDTH = 8

test_scan_index = run_with(Engine(ScanIndex, ScanIndex.open, save_exact), OF_VECTORS)


def test_folders_are_those_of_the_exact_engine() -> None:
    assert EXACT == ENGINE


@pytest.mark.parametrize("count", [1, 2, 3, 17, 18, 19, 20, 37, 400])
def test_intervals_are_the_relative_positions(count: int) -> None:
    rng = np.random.default_rng(count)
    for taken in ([], [0], [count - 1], rng.permutation(count)[:3].tolist()):
        found = [-1] * count
        before = 0
        for start, stop, position in intervals(Placement("relative"), taken, count):
            assert before == start < stop
            found[start:stop] = [position] * (stop - start)
            before = stop
        assert found == reference.relative_positions(taken, count)


def test_a_rotation_is_that_of_the_formula_and_can_be_undone() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((5, WIDTH)).astype(np.float32)
    places = np.array([0, 1, 20, 2_000, 3_000_000])
    turned = rotated(vectors, places, 10_000.0)
    expected = np.stack([reference.rotated(*pair) for pair in zip(vectors, places, strict=True)])
    np.testing.assert_allclose(turned, expected, atol=1e-6)
    np.testing.assert_array_equal(turned[0], vectors[0])
    assert np.abs(turned[1:] - vectors[1:]).max(axis=1).min() > 0.1
    np.testing.assert_allclose(rotated(turned, places, 10_000.0, back=True), vectors, atol=1e-6)


@pytest.mark.parametrize("kind", ["none", "absolute", "random", "relative"])
@pytest.mark.parametrize("block", [3, 1000])
@pytest.mark.parametrize("filtered", [False, True])
def test_the_best_are_those_of_all_scores(
    kind: str, block: int, filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "_BLOCK", block * WIDTH)
    rng = np.random.default_rng(1)
    count, k = 50, 7
    # Whole numbers, many of them equal: ties go to the lowest number.
    vectors = rng.integers(-1, 2, (count, WIDTH)).astype(np.float32)
    states = rng.integers(-2, 3, (3, WIDTH)).astype(np.float32)
    taken = [[], [4], [30, 2, 31]]
    index = of_texts([f"text {n}" for n in range(count)], vectors)
    where = {"even": True} if filtered else None
    found = scan(index, states, taken, Placement(kind), k, where=where)
    for state, own, numbers, scores in zip(states, taken, *found, strict=True):
        places = reference.chunk_positions(kind, own, count)
        turned = [reference.rotated(*pair) for pair in zip(vectors, places, strict=True)]
        q = np.stack(turned) @ state
        q[own] = -np.inf
        if filtered:
            q[1::2] = -np.inf
        best = np.sort(q)[::-1][:k]
        np.testing.assert_allclose(scores, best, atol=1e-5)
        np.testing.assert_allclose(q[numbers], best, atol=1e-5)
        assert len(set(numbers)) == k
        if kind == "none":
            np.testing.assert_array_equal(numbers, np.argsort(-q, kind="stable")[:k])
    plain = scan(index, states, [[]] * 3, Placement(), k, where=where)
    for one, other in zip(plain, index.search(Queries([""] * 3, states), k, where), strict=True):
        np.testing.assert_array_equal(one, other)


def test_fewer_passages_than_asked_for() -> None:
    index = of_texts(["a", "b", "c"], np.eye(3, 4, dtype=np.float32))
    states = np.ones((1, 4), np.float32)
    found = scan(index, states, [[1]], Placement("relative"), 5, where={"even": True})
    assert sorted(found.numbers[0, :2]) == [0, 2]
    np.testing.assert_array_equal(found.numbers[0, 2:], [NONE] * 3)
    np.testing.assert_array_equal(found.scores[0, 2:], [-np.inf] * 3)

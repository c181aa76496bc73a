"""Exact searches against what every engine does: storages, devices, positions, faiss' own files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.retrieval import exact
from qrag_jax.retrieval import vectors as scanning
from qrag_jax.retrieval.exact import STORAGES, ExactIndex
from qrag_jax.retrieval.protocol import NONE, Queries
from qrag_jax.retrieval.vectors import scan
from qrag_jax.runtime.platform import CompilationCounter
from tests import reference
from tests.devices import mesh_of
from tests.retrieval.small_corpus import assert_same, of_texts, positions, searched, task_of


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and spans although corpora are small; none divides them."""
    monkeypatch.setattr(exact, "_CPU_BLOCK", 48)
    monkeypatch.setattr(exact, "_CPU_SPAN", 150)
    monkeypatch.setattr(exact, "_CPU_GATHERED", 2**12)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("devices", "storage"), [((2, 2, 2), "float32"), ((1, 2, 1), "int8"), ((1, 1, 1), "bfloat16")]
)
def test_numbers_are_those_of_numpy(
    devices: tuple[int, int, int], storage: str, tmp_path: Path
) -> None:
    """Scores of whole numbers are the same in all storages, for they are scored again. Some
    devices have no passage of the small corpus."""
    for passages, width, k in ((3, 5, 5), (1003, 7, 40)):
        task = task_of(tmp_path / f"{passages}", passages, width)
        index = ExactIndex(task.corpus, task.vectors, mesh_of(*devices), storage)
        for where, most in ((None, 1), (None, k), ({"kind": [0, 3]}, k)):
            assert_same(index.search(task.queries, most, where), searched(task, most, where))


def test_as_accelerators_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks written out one after the other, products of bfloat16 factors."""
    monkeypatch.setattr(exact.Platform, "on_cpu", False)
    for name, value in (("_SCORES", 2**9), ("_BLOCKS", 9), ("_MAXIMA", 2**8), ("_ALIGNED", 32)):
        monkeypatch.setattr(exact, name, value)
    monkeypatch.setattr(exact, "_CANDIDATES", dict.fromkeys(STORAGES, 3.0))
    task = task_of(tmp_path, 3001)
    for storage in ("float32", "bfloat16", "int8"):
        index = ExactIndex(task.corpus, task.vectors, mesh_of(2, 2, 2), storage)
        for where in (None, {"kind": [1, 2]}):
            assert_same(index.search(task.queries, 20, where), searched(task, 20, where))


def test_batches_are_a_few_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_CPU_BATCH", 16)
    task = task_of(tmp_path, 83, queries=50)
    index = ExactIndex(task.corpus, task.vectors, mesh_of())
    for count in (1, 8, 16):
        index.search(Queries([""] * count, task.queries.vectors[:count]), 10)
    counter = CompilationCounter()
    for count in (2, 7, 9, 15, 33, 50):
        index.search(Queries([""] * count, task.queries.vectors[:count]), 10)
    assert counter.count == 0
    assert_same(index.search(task.queries, 10), searched(task, 10))


# ---------------------------------------------------------------------- positions

PLACED = 8  # width


@pytest.mark.parametrize(
    ("kind", "block"), [("none", 3), ("absolute", 3), ("random", 1000), ("relative", 3)]
)
def test_the_best_are_those_of_all_scores(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "_BLOCK", block * PLACED)
    rng = np.random.default_rng(1)
    # Whole numbers, many of them equal: ties go to the lowest number.
    vectors = rng.integers(-1, 2, (50, PLACED)).astype(np.float32)
    states = rng.integers(-2, 3, (3, PLACED)).astype(np.float32)
    taken = [[], [4], [30, 2, 31]]
    index = of_texts([f"text {n}" for n in range(50)], vectors)
    for where, k in ((None, 7), ({"even": True}, 7), ({"even": True}, 60)):
        found = scan(index, states, taken, positions(kind), k, where=where)
        for state, known, numbers, scores in zip(states, taken, *found, strict=True):
            places = reference.chunk_positions(kind, known, 50)
            turned = [reference.rotated(*pair) for pair in zip(vectors, places, strict=True)]
            q = np.stack(turned) @ state
            q[known] = -np.inf
            if where:
                q[1::2] = -np.inf
            top = np.sort(q)[::-1][:k]
            there = numbers[numbers != NONE]
            assert len({*there}) == len(there) == np.isfinite(top).sum()
            np.testing.assert_allclose(scores[: len(there)], top[: len(there)], atol=1e-5)
            np.testing.assert_allclose(q[there], top[: len(there)], atol=1e-5)
            assert (scores[len(there) :] == -np.inf).all()

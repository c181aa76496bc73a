"""The best chunks of long documents against all Q-values worked out one by one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from qrag_jax.environments.positions import RANDOM_PUBLISHED, draw_indents
from qrag_jax.policies.document_scores import BLOCK, Searches, make_best_chunks, padded_chunks
from qrag_jax.policies.soft_q import MASKED
from tests import reference
from tests.devices import mesh_of

STEPS, WIDTH, K = 4, 8, 3
TEXTS = 700  # rows of the table, fewer than the chunks: texts occur again, and Q-values tie


class Case(NamedTuple):
    """B documents of unequal length, W states each."""

    kind: str
    table: np.ndarray  # [N, 2D]
    rows: list[np.ndarray]  # of each document, [C]
    counts: np.ndarray  # [B]
    states: np.ndarray  # [B, W, 2D]
    taken: np.ndarray  # [B, W, T]


def case(kind: str, counts: tuple[int, ...], states: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    taken = np.full((len(counts), states, STEPS), -1, np.int32)
    for document, count in enumerate(counts):
        for state in range(states):
            some = rng.choice(count, min(count, int(rng.integers(0, STEPS))), replace=False)
            taken[document, state, : len(some)] = some
    return Case(
        kind=kind,
        table=rng.standard_normal((TEXTS, WIDTH)).astype(np.float32),
        rows=[rng.integers(0, TEXTS, count) for count in counts],
        counts=np.array(counts, np.int32),
        states=rng.standard_normal((len(counts), states, WIDTH)).astype(np.float32),
        taken=taken,
    )


# Several blocks on several devices; documents that end inside a block and within the first one.
COUNTS = (2500, 1024, 50, 3, 1)
CASES = {
    kind: case(kind, COUNTS, states=2, seed=number)
    for number, kind in enumerate(("none", "absolute", "relative"))
}
# Of at most 2,000 chunks.
CASES[RANDOM_PUBLISHED] = case(RANDOM_PUBLISHED, (1500, 200, 7, 3, 1), states=2, seed=8)
SEVERAL = [("relative", (2, 4)), (RANDOM_PUBLISHED, (2, 4))]


def searches(case: Case) -> Searches:
    """Every state of the case, with the keys that its documents are placed by."""
    keys = jax.random.split(jax.random.key(3), len(case.counts))
    return Searches(case.counts, case.states, case.taken, keys)


def found(case: Case, mesh: Mesh, k: int = K) -> tuple[np.ndarray, np.ndarray]:
    """Values and indices `[B, W, k]` of a case on a mesh."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = np.zeros((len(case.counts), padded_chunks(int(max(case.counts)), devices)), np.int32)
    for row, own in zip(rows, case.rows, strict=True):
        row[: len(own)] = own
    best = make_best_chunks(mesh, case.kind, STEPS, k)
    return jax.device_get(best(case.table, rows, searches(case)))


def all_q(case: Case, document: int, state: int) -> np.ndarray:
    """Q of every chunk, -inf where it was taken, float64 `[C]`."""
    count = int(case.counts[document])
    taken = [int(i) for i in case.taken[document, state] if i >= 0]
    where = reference.chunk_positions(case.kind, taken, count)
    if case.kind == RANDOM_PUBLISHED:
        indents = draw_indents(searches(case).keys, case.counts)
        where = indents.positions(np.arange(count)[None].repeat(len(case.counts), 0))[document]
        where = [int(p) for p in where]
        assert where != list(range(count)) or count == 1
    texts = case.table[case.rows[document]]
    vector = case.states[document, state].astype(np.float64)
    q = np.array([reference.rotated(t, p) @ vector for t, p in zip(texts, where, strict=True)])
    q[taken] = -np.inf
    return q


def check(case: Case, values: np.ndarray, index: np.ndarray) -> None:
    k = values.shape[-1]
    for document, state in np.ndindex(values.shape[:2]):
        q = all_q(case, document, state)
        best = np.argsort(-q, kind="stable")[:k]
        best = best[np.isfinite(q[best])]
        there = len(best)
        np.testing.assert_allclose(values[document, state, :there], q[best], atol=2e-5)
        np.testing.assert_array_equal(values[document, state, there:], np.float32(MASKED))
        assert index[document, state, :there].tolist() == best.tolist()


@pytest.mark.parametrize(("name", "devices"), [*((name, (1, 1)) for name in CASES), *SEVERAL])
def test_best_chunks(name: str, devices: tuple[int, int]) -> None:
    check(CASES[name], *found(CASES[name], mesh_of(*devices)))


def test_equal_values_go_to_the_lowest_index() -> None:
    one = case("none", (2 * BLOCK + 40,), states=1, seed=9)
    one.table[:] = one.table[0]
    one.taken[0, 0] = (0, 2, -1, -1)
    _, index = found(one, mesh_of(), 2)
    assert index[0, 0].tolist() == [1, 3]


def test_memory_is_that_of_one_block() -> None:
    """Beside what comes in: as much for 400,000 chunks as for a few blocks of them."""
    best = make_best_chunks(mesh_of(), "relative", STEPS, 2)
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))

    def temporary(chunks: int) -> int:
        shapes = [(5000, WIDTH), (1, padded_chunks(chunks, 1)), (1,), (1, 2, WIDTH), (1, 2, STEPS)]
        kinds = [np.float32, np.int32, np.int32, np.float32, np.int32]
        table, rows, *of_searches = map(jax.ShapeDtypeStruct, shapes, kinds)
        lowered = best.lower(table, rows, Searches(*of_searches, key))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(4 * BLOCK), temporary(400_000)
    # The rows of the document, four bytes a chunk, may be laid out anew; embeddings are not.
    assert many - few <= 2 * 4 * 400_000
    assert few < 2 * 2 * BLOCK * 40 * WIDTH * 4

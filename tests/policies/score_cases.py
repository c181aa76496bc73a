"""Documents, states and chunks taken, on which the scores of long documents are tested."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.policies.document_scores import Searches, make_best_chunks, padded_chunks

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
LONG, SHORT = (2500, 1024, 3, 1), (50, 17, 2)
CASES = {
    f"{kind}-{name}": case(kind, counts, states=2, seed=number)
    for number, kind in enumerate(("none", "absolute", "random", "relative"))
    for name, counts in (("long", LONG), ("short", SHORT))
}
# Of at most 2,000 chunks.
CASES["random_published"] = case("random_published", (1500, 200, 7, 3, 1), states=2, seed=8)


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

"""The best chunks over eight devices, as a program; `sharded_scores OUT` leaves what it found."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.policies.document_scores import make_best_chunks, padded_chunks
from qrag_jax.runtime.mesh import AXES
from tests.policies.score_cases import CASES, STEPS, Case, K


def found(case: Case, mesh: Mesh, k: int = K) -> tuple[np.ndarray, np.ndarray]:
    """Values and indices `[B, W, k]` of a case on a mesh."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = np.zeros((len(case.counts), padded_chunks(int(max(case.counts)), devices)), np.int32)
    for row, own in zip(rows, case.rows, strict=True):
        row[: len(own)] = own
    best = make_best_chunks(mesh, case.kind, STEPS, k)
    documents = case.counts, case.states, case.taken, keys(case)
    return jax.device_get(best(case.table, rows, *documents))


def keys(case: Case) -> jax.Array:
    """Of the draws that documents are placed by."""
    return jax.random.split(jax.random.key(3), len(case.counts))


def main() -> None:
    out = Path(sys.argv[1])
    assert jax.device_count() == 8
    for shape in ((8, 1, 1), (2, 4, 1)):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), AXES)
        for name, case in CASES.items():
            values, index = found(case, mesh)
            np.savez(out / f"{name}-{shape[0]}-{shape[1]}.npz", values=values, index=index)


if __name__ == "__main__":
    main()

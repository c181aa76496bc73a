"""Exact search in NumPy that looks at every vector: for chunk vectors that stand at positions.

A passage's score is `<s, R(p)a>`, and its position p may depend on what was taken, so no engine
holds the vectors to search for. They are read block by block, and only the best stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qrag_jax.retrieval.chunk_positions import BY_NUMBER, RELATIVE, Placement, intervals, rotated
from qrag_jax.retrieval.protocol import (
    Corpus,
    Hits,
    Queries,
    VectorIndex,
    Where,
    check_k,
    ranked,
)
from qrag_jax.retrieval.vectors import Vectors, check_count, checked, open_vectors, query_vectors

EXACT = "exact"  # `exact.ENGINE`, which cannot be imported without jax
_BLOCK = 2**22  # numbers of vectors read at a time


def scan(
    index: VectorIndex,
    states: np.ndarray,
    taken: Sequence[Sequence[int]],
    placement: Placement,
    k: int,
    *,
    where: Where | None = None,
) -> Hits:
    """The k passages not taken with the highest `<s, R(p)a>` of each state.

    Equal scores rank by number. Each call reads all vectors of the index once.

    Args:
        states: float32 `[S, width]`.
        taken: the numbers of the passages taken in each state.
        placement: where passages stand; "none" gives the plain inner products.
    """
    count = len(index.corpus)
    allowed = None if where is None else index.corpus.matching(where)
    turned = [_turned_back(placement, state, own, count) for state, own in zip(states, taken)]
    nothing = np.zeros((len(states), 0))
    best = ranked(nothing, nothing, k)
    size = max(_BLOCK // max(states.shape[1], 1), 1)
    for start in range(0, count if turned else 0, size):
        numbers = np.arange(start, min(start + size, count))
        if allowed is not None:
            numbers = numbers[allowed[numbers]]
        vectors = index.vectors(numbers)
        if placement.kind in BY_NUMBER:
            vectors = rotated(vectors, numbers, placement.theta)
        scores = np.stack([_scores(own, vectors, numbers) for own in turned])
        for row, own in zip(scores, taken):
            row[np.isin(numbers, own)] = -np.inf
        # Of equal scores those of earlier blocks stay.
        better = (scores > best.scores[:, -1:]).any(axis=0)
        numbers = np.broadcast_to(numbers[better], (len(scores), better.sum()))
        numbers = np.concatenate([best.numbers, numbers], axis=1)
        best = ranked(numbers, np.concatenate([best.scores, scores[:, better]], axis=1), k)
    return best


# The numbers at which intervals start, and the state to multiply the passages of each by.
_Turned = tuple[np.ndarray, np.ndarray]


def _turned_back(
    placement: Placement, state: np.ndarray, taken: Sequence[int], count: int
) -> _Turned:
    """`<s, R(p)a>` equals `<R(-p)s, a>`, and the passages of an interval share their p."""
    if placement.kind != RELATIVE:
        return np.zeros(1, np.int64), state[None]
    starts, _, places = np.array(list(intervals(placement, taken, count))).T
    spread = np.broadcast_to(state, (len(starts), len(state)))
    return starts, rotated(spread, places, placement.theta, back=True)


def _scores(turned: _Turned, vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """float32 `[n]`: the scores of a block's passages."""
    starts, states = turned
    scores = np.empty(len(numbers), np.float32)
    # Where the passages of each interval begin and end in the block.
    bounds = np.append(np.searchsorted(numbers, starts), len(numbers))
    for state, first, last in zip(states, bounds, bounds[1:], strict=False):
        if first < last:
            # Not a product of BLAS, which may round equal vectors differently.
            scores[first:last] = np.einsum("nd,d->n", vectors[first:last], state)
    return scores


class ScanIndex:
    """An engine that scans vectors on the host; see `protocol.VectorIndex`. It needs no jax.

    Its folders are those of the engine "exact".

    Args:
        vectors: theirs, in the same order, `[passages, width]`.
    """

    def __init__(self, corpus: Corpus, vectors: np.ndarray | Vectors, encoder: str = "") -> None:
        if not isinstance(vectors, Vectors):
            vectors = Vectors([checked(vectors, "the index")])
        check_count(len(vectors), len(corpus))
        self.corpus, self.encoder, self._vectors = corpus, encoder, vectors

    @classmethod
    def open(cls, folder: Path, corpus: Corpus) -> ScanIndex:
        """The index of a folder."""
        manifest, vectors = open_vectors(folder, engine=EXACT, corpus=corpus.digest)
        return cls(corpus, vectors, manifest.encoder)

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest inner products; see `protocol.Index`."""
        check_k(k)
        given = query_vectors(queries, self._vectors.width)
        return scan(self, given, [()] * len(given), Placement(), k, where=where)

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the passages' vectors."""
        return self._vectors.rows(numbers)

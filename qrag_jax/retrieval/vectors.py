"""Vectors of passages on the host, in memory or mapped, and exact search of them in NumPy.

The search looks at every vector, for chunk vectors that stand at positions: a passage's score is
`<s, R(p)a>`, and its position p may depend on what was taken, so no engine holds the vectors to
search for. They are read block by block, and only the best stay.

Positions are those of `models.compute.attention.rotate`: each half of a vector (width H) is rotated
by itself, its pair (2j, 2j + 1) by p·theta^(-2j/H) (Q-RAG, arXiv 2511.07328). Angles are float64,
so they are exact to float32 at any position.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Hits, Queries, VectorIndex, Where, ranked
from qrag_jax.runtime.retriever_config import Positions

if TYPE_CHECKING:
    from qrag_jax.retrieval.corpus import StoredCorpus

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def check_finite(vectors: np.ndarray, what: str, first: int = 0) -> None:
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        number = first + int(finite.argmin())
        raise InputError(
            f"{what}: the vector {number}, from 0, is not finite; see the encoder, and embed again."
        )


def float_rows(vectors: np.ndarray, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """float32 `[len(numbers), width]`: the vectors of these numbers."""
    return np.asarray(vectors[np.asarray(numbers, np.int64)], np.float32)


def query_vectors(queries: Queries, width: int) -> np.ndarray:
    """float32 `[queries, width]`; numbers that are not finite are refused."""
    vectors = np.asarray(queries.vectors, np.float32)
    if vectors.shape != (len(queries), width):
        raise ValueError(f"{vectors.shape} vectors for {len(queries)} queries of the width {width}")
    check_finite(vectors, "the queries")
    return vectors


# ---------------------------------------------------------------- scanning

_BLOCK = 2**22  # numbers of vectors read at a time


def intervals(
    placement: Positions, taken: Sequence[int], count: int
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, position): intervals of one position that a corpus is cut into, in order.

    As `environments.positions.relative`: the taken passages cut the corpus into segments, and the m
    passages of segment j have the positions ⌊step·j + linspace(0, span, m)⌋.
    """
    for j, (first, last) in enumerate(itertools.pairwise([0, *sorted(taken), count])):
        gaps = max(last - first - 1, 1)
        # Place i has the position span·i // gaps, so position p begins at i = ⌈p·gaps / span⌉.
        starts = [first - (-p * gaps // placement.span) for p in range(placement.span + 1)]
        for p, (start, stop) in enumerate(itertools.pairwise([*starts, last])):
            if start < min(stop, last):
                yield start, min(stop, last), placement.step * j + p


def rotated(
    vectors: np.ndarray, positions: np.ndarray | int, theta: float, *, back: bool = False
) -> np.ndarray:
    """Vectors `[n, 2H]` rotated at the positions `[n]`, float32.

    `back` undoes a rotation: `<s, R(p)a> = <R(-p)s, a>`.
    """
    half = vectors.shape[-1] // 2
    frequency = theta ** (-np.arange(0, half, 2, dtype=np.float64) / half)
    angles = np.asarray(positions, np.float64)[..., None] * frequency
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    cos, sin = cos[..., None, :], (-sin if back else sin)[..., None, :]  # the same for both halves
    pairs = vectors.astype(np.float32).reshape(*vectors.shape[:-1], 2, -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(vectors.shape)


def scan(
    index: VectorIndex,
    states: np.ndarray,
    taken: Sequence[Sequence[int]],
    placement: Positions | None,
    k: int,
    *,
    where: Where | None = None,
) -> Hits:
    """The k passages not taken with the highest `<s, R(p)a>` of each state.

    Equal scores rank by number. Each call reads all vectors of the index once.

    Args:
        states: float32 `[S, width]`.
        taken: the numbers of the passages taken in each state.
        placement: of passages; None gives the plain inner products.
    """
    count = len(index.corpus)
    allowed = None if where is None else index.corpus.matching(where)
    turned = [_turned_back(placement, state, past, count) for state, past in zip(states, taken)]
    nothing = np.zeros((len(states), 0))
    best = ranked(nothing, nothing, k)
    size = max(_BLOCK // max(states.shape[1], 1), 1)
    for start in range(0, count if turned else 0, size):
        numbers = np.arange(start, min(start + size, count))
        if allowed is not None:
            numbers = numbers[allowed[numbers]]
        vectors = index.vectors(numbers)
        if placement is not None and placement.kind != "relative":  # its number
            vectors = rotated(vectors, numbers, placement.theta)
        scores = np.stack([_scores(state, vectors, numbers) for state in turned])
        for row, past in zip(scores, taken):
            row[np.isin(numbers, past)] = -np.inf
        # Of equal scores those of earlier blocks stay.
        better = (scores > best.scores[:, -1:]).any(axis=0)
        numbers = np.broadcast_to(numbers[better], (len(scores), better.sum()))
        numbers = np.concatenate([best.numbers, numbers], axis=1)
        best = ranked(numbers, np.concatenate([best.scores, scores[:, better]], axis=1), k)
    return best


# The numbers at which intervals start, and the state to multiply the passages of each by.
_Turned = tuple[np.ndarray, np.ndarray]


def _turned_back(
    placement: Positions | None, state: np.ndarray, taken: Sequence[int], count: int
) -> _Turned:
    """`<s, R(p)a>` equals `<R(-p)s, a>`, and the passages of an interval share their p."""
    if placement is None or placement.kind != "relative":
        return np.zeros(1, np.int64), state[None]
    starts, _, places = np.array([*intervals(placement, taken, count)], np.int64).reshape(-1, 3).T
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
    """

    def __init__(self, corpus: StoredCorpus, vectors: np.ndarray) -> None:
        self.corpus, self._vectors = corpus, vectors

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        vectors = query_vectors(queries, self._vectors.shape[1])
        return scan(self, vectors, [()] * len(vectors), None, k, where=where)

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        return float_rows(self._vectors, numbers)

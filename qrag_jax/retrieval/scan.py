"""Exact search in NumPy that looks at every vector: for chunk vectors that stand at positions.

A passage's score is `<s, R(p)a>`, and its position p may depend on what was taken, so no engine
holds the vectors to search for. They are read block by block, and only the best stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qrag_jax.retrieval.chunk_positions import BY_NUMBER, RELATIVE, Placement, intervals, rotated
from qrag_jax.retrieval.protocol import NONE, Hits, VectorIndex, Where

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

    Raises:
        InputError: as `Corpus.matching` raises it.
    """
    count = len(index.corpus)
    allowed = None if where is None else index.corpus.matching(where)
    turned = [_turned_back(placement, state, own, count) for state, own in zip(states, taken)]
    best = Hits(np.zeros((len(states), 0), np.int64), np.zeros((len(states), 0), np.float32))
    size = max(_BLOCK // max(states.shape[1], 1), 1)
    for start in range(0, count, size):
        numbers = np.arange(start, min(start + size, count))
        if allowed is not None:
            numbers = numbers[allowed[numbers]]
        if len(numbers):
            vectors = index.vectors(numbers)
            if placement.kind in BY_NUMBER:
                vectors = rotated(vectors, numbers, placement.theta)
            scores = np.stack([_scores(own, vectors, numbers) for own in turned])
            for row, own in zip(scores, taken):
                row[np.isin(numbers, own)] = -np.inf
            best = _merged(best, numbers, scores, k)
    short = ((0, 0), (0, k - best.numbers.shape[1]))
    numbers = np.pad(np.where(np.isinf(best.scores), NONE, best.numbers), short)
    numbers[:, best.numbers.shape[1] :] = NONE
    return Hits(numbers, np.pad(best.scores, short, constant_values=-np.inf))


# The numbers at which intervals start, and the state to multiply the passages of each by.
_Turned = tuple[np.ndarray, np.ndarray]


def _turned_back(
    placement: Placement, state: np.ndarray, taken: Sequence[int], count: int
) -> _Turned:
    """`<s, R(p)a>` equals `<R(-p)s, a>`, and the passages of an interval share their p."""
    if placement.kind != RELATIVE:
        return np.zeros(1, np.int64), state[None]
    cut = list(intervals(placement, taken, count))
    places = np.array([interval.position for interval in cut])
    starts = np.array([interval.start for interval in cut])
    spread = np.broadcast_to(state, (len(cut), len(state)))
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


def _merged(best: Hits, numbers: np.ndarray, scores: np.ndarray, k: int) -> Hits:
    """The k best of those so far and of a block, whose numbers are higher."""
    scores = np.concatenate([best.scores, scores], axis=1)
    numbers = np.concatenate(
        [best.numbers, np.broadcast_to(numbers, (len(scores), len(numbers)))], axis=1
    )
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return Hits(np.take_along_axis(numbers, order, 1), np.take_along_axis(scores, order, 1))

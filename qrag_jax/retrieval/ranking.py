"""Puts found passages in order: by score, and by number where scores are equal."""

from __future__ import annotations

import numpy as np

from qrag_jax.retrieval.protocol import NONE, Hits


def ranked(numbers: np.ndarray, scores: np.ndarray, k: int) -> Hits:
    """The k best of some passages of each query.

    Args:
        numbers: int `[queries, n]`, each once, or `NONE`.
        scores: float `[queries, n]`.
    """
    numbers = np.asarray(numbers, np.int64)
    scores = np.where(numbers == NONE, -np.inf, scores).astype(np.float32)
    order = np.lexsort((numbers, -scores), axis=1)[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    numbers = np.where(scores == -np.inf, NONE, np.take_along_axis(numbers, order, axis=1))
    short = ((0, 0), (0, k - scores.shape[1]))
    return Hits(
        np.pad(numbers, short, constant_values=NONE),
        np.pad(scores, short, constant_values=-np.inf),
    )

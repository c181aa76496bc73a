"""The threshold of Q at which to stop: every value that makes a difference, in one sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qrag_jax.metrics.retrieval_log import Row

OBJECTIVES = ("fact_f1", "fact_precision", "fact_recall", "fact_em")


class Sweep(NamedTuple):
    """Means over the rows at each threshold, all `[n]`, thresholds ascending, the first -inf.

    A row stops before its first step whose Q is at most the threshold. Each threshold lies midway
    between two neighbouring values at which some row stops elsewhere; the last stops all at once.
    """

    thresholds: np.ndarray
    fact_f1: np.ndarray
    fact_precision: np.ndarray
    fact_recall: np.ndarray
    fact_em: np.ndarray
    steps: np.ndarray

    def best(self, objective: str) -> int:
        """The place of the best threshold; of equals the highest, which takes the fewest steps."""
        values = getattr(self, objective)
        return int(np.flatnonzero(values >= values.max() - 1e-12)[-1])


def sweep(rows: Sequence[Row]) -> Sweep:
    """Scores of stopping at every threshold, in O(steps·log steps) for all of them together.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("a sweep needs at least one row")
    # A row stops at step t once the threshold reaches the least Q of its steps up to t.
    levels, rises = [], []
    first = np.zeros(5)
    for row in rows:
        scores = _scores_by_steps(row)
        first += scores[-1]
        reached = np.minimum.accumulate(np.asarray(row.q_values, np.float64))
        for t in range(len(reached)):
            # At level reached[t] the row keeps t steps instead of t + 1.
            levels.append(reached[t])
            rises.append(scores[t] - scores[t + 1])
    order = np.argsort(levels, kind="stable")
    at = np.asarray(levels, np.float64)[order]
    sums = np.cumsum(np.reshape(rises, (-1, 5))[order], axis=0)
    totals = first + np.concatenate([np.zeros((1, 5)), sums])
    # Between two values that are the same there is no threshold.
    last = np.flatnonzero(np.append(at[1:] > at[:-1], True)[: len(at)])
    values = at[last]
    above = np.append((values[1:] + values[:-1]) / 2, values[-1:])
    means = totals[np.append(0, last + 1)] / len(rows)
    return Sweep(np.append(-np.inf, above), *means.T)


def _scores_by_steps(row: Row) -> np.ndarray:
    """F1, precision, recall, EM and steps when only the first n steps are kept, `[T + 1, 5]`."""
    support = set(row.sf_idx)
    hits = np.cumsum([0, *(chunk in support for chunk in row.pred_idx)])
    steps = np.arange(len(row.pred_idx) + 1)
    return np.stack(
        [
            2 * hits / (steps + len(support)),
            hits / np.maximum(steps, 1),
            hits / len(support),
            hits == len(support),
            steps,
        ],
        axis=1,
    )

"""Scores every stopping threshold on the Q value and chooses the best one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qrag_jax.errors import InputError
from qrag_jax.metrics.rows import Row

OBJECTIVES = ("fact_f1", "fact_em", "fact_precision", "fact_recall")
# Sums over the rows are rounded differently from one threshold to the next. Scores this close count
# as equal. Two different means of F1 over 100,000 questions differ by more than this.
_TIE = 1e-10


@dataclasses.dataclass(frozen=True, slots=True)
class Sweep:
    """Scores of all thresholds that take different chunks; the first threshold takes nothing.

    Attributes:
        thresholds: `[K]`, falling; at each, play stops at the first step with Q <= threshold.
        scores: the objectives and `steps` (chunks taken) by name, means over the rows, `[K]` each.
    """

    thresholds: NDArray[np.float64]
    scores: dict[str, NDArray[np.float64]]


def sweep(rows: Sequence[Row]) -> Sweep:
    """Scores of every threshold, exactly, in one pass over the sorted values.

    A step is taken if neither its Q nor an earlier Q is at most the threshold, that is if the
    running minimum of Q is above the threshold. So decisions change only at the running minima,
    and K is one more than the number of distinct minima. The minima are sorted from the highest;
    each adds the change of score of its step. A threshold lies in the middle of two neighbouring
    minima, with the largest margin to both. The two outermost thresholds lie beyond the minima, by
    half the mean distance of the minima.
    """
    longest = max((len(row.pred_idx) for row in rows), default=0)
    if longest == 0:
        raise InputError("no row holds a chunk taken: there is no threshold to tune")
    taken = np.zeros((len(rows), longest), bool)
    hits = np.zeros((len(rows), longest))
    q = np.full((len(rows), longest), np.inf)
    facts = np.empty((len(rows), 1))
    for i, row in enumerate(rows):
        if len(row.q_values) != len(row.pred_idx):
            raise InputError(
                f"sample {row.id} has {len(row.q_values)} Q values for {len(row.pred_idx)} chunks "
                "taken; tune on the log of a retriever's play, not a filtered one"
            )
        gold = set(row.sf_idx)
        taken[i, : len(row.pred_idx)] = True
        q[i, : len(row.pred_idx)] = row.q_values
        hits[i, : len(row.pred_idx)] = [index in gold for index in row.pred_idx]
        facts[i] = len(gold)

    minima = np.minimum.accumulate(q, axis=1)[taken]
    order = np.argsort(-minima, kind="stable")
    minima = minima[order]
    ends = np.flatnonzero(np.append(minima[1:] != minima[:-1], True))  # last of equal minima
    scores = {}
    for name, prefix in _prefix_scores(hits, facts).items():
        changes = np.cumsum(np.diff(prefix, axis=1)[taken][order])[ends]
        scores[name] = np.concatenate([[0.0], changes]) / len(rows)
    return Sweep(_between(minima[ends]), scores)


def choose(values: Sequence[float] | NDArray[np.float64], steps: Sequence[float] | NDArray) -> int:
    """Index of the highest value; among equal values (within 1e-10), the fewest steps win."""
    value = np.asarray(values, np.float64)
    best = np.flatnonzero(value >= value.max() - _TIE)
    return int(best[np.argmin(np.asarray(steps)[best])])


def _prefix_scores(
    hits: NDArray[np.float64], facts: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Scores of the first 0, 1, … T chunks of each row, `[n, T + 1]` each."""
    found = np.pad(np.cumsum(hits, axis=1), ((0, 0), (1, 0)))
    steps = np.broadcast_to(np.arange(found.shape[1], dtype=np.float64), found.shape)
    return {
        "fact_f1": 2.0 * found / (facts + steps),
        "fact_em": (found == facts).astype(np.float64),
        "fact_precision": found / np.maximum(steps, 1.0),
        "fact_recall": found / facts,
        "steps": steps,
    }


def _between(minima: NDArray[np.float64]) -> NDArray[np.float64]:
    """The `[D + 1]` thresholds around the falling, distinct `minima` `[D]`."""
    spread = float(minima[0] - minima[-1])
    gap = spread / (minima.size - 1) if spread > 0 else 1.0
    upper = np.concatenate([[minima[0] + gap], minima])
    lower = np.concatenate([minima, [minima[-1] - gap]])
    middle = lower + (upper - lower) / 2.0
    # Devices compare in float32, where the middle of two neighbouring numbers rounds to one of
    # them. It must not round to the upper one, because a step with that Q is taken.
    rounded = middle.astype(np.float32).astype(np.float64)
    return np.where((lower <= rounded) & (rounded < upper), rounded, lower)

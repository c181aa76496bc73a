"""Chunk vectors at their positions, in NumPy: the angles of `models.compute.rope.rotate`.

Each half of a vector (width H) is rotated by itself, its pair (2j, 2j + 1) by p·theta^(-2j/H)
(Q-RAG, arXiv 2511.07328). Angles are float64, so they are exact to float32 at any position.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

NO_POSITIONS, RELATIVE = "none", "relative"
BY_NUMBER = ("absolute", "random")  # a passage's position is its number: one in a search


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where passages stand.

    Attributes:
        kind: "none"; "absolute" or "random", the number; "relative", see `intervals`.
        step: of "relative": positions from the start of one interval to that of the next.
        span: of "relative": the position of an interval's last passage within it.
    """

    kind: str = NO_POSITIONS
    theta: float = 10_000.0
    step: int = 20
    span: int = 18


def intervals(
    placement: Placement, taken: Sequence[int], count: int
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

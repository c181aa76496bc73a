"""Vectors of passages on the host, in memory or in mapped files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Queries

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_PIECE = 2**24  # numbers looked at at a time


class Vectors:
    """Vectors `[count, width]` in parts, one behind the other.

    Args:
        parts: `[n, width]` each, of one dtype of `DTYPES`; one at least.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])
        self.width, self.dtype = int(parts[0].shape[1]), parts[0].dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def blocks(self, start: int, stop: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """Pairs (number of the first, vectors `[at most size, width]`) from `start` to `stop`."""
        for first, part in zip(self._starts, self._parts, strict=False):
            low, high = max(start, int(first)), min(stop, int(first) + len(part))
            for at in range(low, high, size):
                yield at, part[at - int(first) : min(at + size, high) - int(first)]

    def rows(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the vectors of these numbers.

        Raises:
            IndexError: there is no vector of such a number.
        """
        wanted = check_numbers(numbers, len(self))
        found = np.empty((len(wanted), self.width), np.float32)
        of_part = np.searchsorted(self._starts, wanted, side="right") - 1
        for part in np.unique(of_part):
            here = of_part == part
            found[here] = self._parts[part][wanted[here] - self._starts[part]]
        return found


def checked(vectors: Any, what: str, width: int | None = None) -> np.ndarray:
    """The vectors as an array `[n, width]` of a dtype of `DTYPES`; other floats become float32.

    Args:
        what: names them in errors.
        width: theirs; None: any.
    """
    array = np.asarray(vectors)
    if array.dtype not in DTYPES.values():
        if array.dtype.kind not in "fiu":
            raise InputError(f"{what}: the vectors are of {array.dtype}; give float32 numbers.")
        array = array.astype(np.float32)
    if array.ndim != 2 or not array.shape[1] or width not in (None, array.shape[1]):
        wanted = "width" if width is None else width
        raise InputError(
            f"{what}: the vectors have the shape {list(array.shape)}, not [number, {wanted}]; give "
            "those of the encoder that the index is for."
        )
    check_finite(array, what)
    return array


def check_finite(vectors: np.ndarray, what: str, first: int = 0) -> None:
    """Refuses NaN and infinite numbers.

    Args:
        vectors: `[n, width]`.
        what: names them in the error.
        first: the number of the first.
    """
    size = max(_PIECE // vectors.shape[1], 1)
    for start in range(0, len(vectors), size):
        finite = np.isfinite(vectors[start : start + size]).all(axis=1)
        if not finite.all():
            number = first + start + int(finite.argmin())
            raise InputError(
                f"{what}: the vector {number}, counted from 0, holds NaN or an infinite number; "
                "embed its text again, and look at the encoder."
            )


def check_count(vectors: int, passages: int) -> None:
    """Refuses vectors that are not as many as the passages, with an `InputError`."""
    if vectors != passages:
        raise InputError(
            f"there are {vectors} vectors for {passages} passages; embed all passages, each once "
            "and in order."
        )


def check_numbers(numbers: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """int64 `[len(numbers)]`: numbers of vectors; an `IndexError` if one is not below `count`."""
    wanted = np.asarray(numbers, np.int64)
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < count):
        raise IndexError(f"vectors {wanted.min()} to {wanted.max()} of {count}")
    return wanted


def query_vectors(queries: Queries, width: int) -> np.ndarray:
    """float32 `[queries, width]`."""
    if queries.vectors is None:
        raise InputError(
            "the queries have no vectors, by which this engine searches; embed them first."
        )
    given = checked(queries.vectors, "the queries", width).astype(np.float32)
    if len(given) != len(queries):
        raise InputError(
            f"there are {len(given)} vectors for {len(queries)} queries; give one each."
        )
    return given

"""Samples made when they are asked for, so that a set of long documents needs no memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import overload

from qrag_jax.data.sample import Sample


class LazySamples(Sequence[Sample]):
    """A sequence whose item i is `make(i)`, made again at every access and never kept.

    Args:
        count: number of samples.
        make: sample of an index from 0 to count - 1, the same at every call.
    """

    def __init__(self, count: int, make: Callable[[int], Sample]) -> None:
        self._indices: range = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> LazySamples: ...

    def __getitem__(self, index: int | slice) -> Sample | LazySamples:
        """The sample of an index, or the lazy samples of a slice."""
        if isinstance(index, slice):
            part = LazySamples(0, self._make)
            part._indices = self._indices[index]
            return part
        return self._make(self._indices[index])


def joined(parts: Sequence[Sequence[Sample]]) -> Sequence[Sample]:
    """The samples of all parts, one after the other; lazy if one of the parts is."""
    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, LazySamples) for part in parts):
        return [sample for part in parts for sample in part]
    ends = list(accumulate(len(part) for part in parts))

    def make(index: int) -> Sample:
        number = bisect.bisect_right(ends, index)
        return parts[number][index - (ends[number] - len(parts[number]))]

    return LazySamples(ends[-1], make)

"""Samples made at each access, so that a set of long documents needs no memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, overload

from qrag_jax.data.sample import Sample


class LazySamples(Sequence[Sample]):
    """A sequence whose item i is `make(i)`, made again at every access and never kept.

    Args:
        count: number of samples.
        make: returns the sample of an index from 0 to count - 1, the same at every call.
        content: digest of the texts that samples are made of; "" if it is not known.
    """

    def __init__(self, count: int, make: Callable[[int], Sample], content: str = "") -> None:
        self._indices: range = range(count)
        self._make, self.content = make, content

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> LazySamples: ...

    def __getitem__(self, index: int | slice) -> Sample | LazySamples:
        """The sample of an index, or the lazy samples of a slice."""
        if isinstance(index, slice):
            part = LazySamples(0, self._make, self.content)
            part._indices = self._indices[index]
            return part
        return self._make(self._indices[index])

    def drawn(self, index: int, epoch: int) -> Sample:
        """The sample in this epoch: the same in all epochs, unless a subclass draws it anew."""
        return self[index]


class _Joined(LazySamples):
    """The samples of several parts, one part after the other."""

    def __init__(self, parts: Sequence[Sequence[Sample]]) -> None:
        self._parts, self._ends = parts, list(accumulate(len(part) for part in parts))
        super().__init__(self._ends[-1], lambda index: self.drawn(index, 0))

    def drawn(self, index: int, epoch: int) -> Sample:
        index = range(len(self))[index]
        number = bisect.bisect_right(self._ends, index)
        part = self._parts[number]
        return drawn(part, index - (self._ends[number] - len(part)), epoch)


def drawn(samples: Sequence[Sample], index: int, epoch: int) -> Sample:
    """The sample as it is in this epoch of its source."""
    return samples.drawn(index, epoch) if isinstance(samples, LazySamples) else samples[index]


def joined(parts: Sequence[Sequence[Sample]]) -> Sequence[Sample]:
    """The samples of all parts, one after the other; lazy if one of the parts is."""
    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, LazySamples) for part in parts):
        return [sample for part in parts for sample in part]
    return _Joined(parts)


class Fit(NamedTuple):
    """How many questions of a split fit documents of a length.

    Attributes:
        fits: number of questions with at most `most` facts.
        stories: number of all questions.
        most: the limit. If several lengths are scored, it is the smallest length for all of them.
    """

    fits: int
    stories: int
    most: int

    def __str__(self) -> str:
        return f"fits {self.fits:,} of {self.stories:,}"


class Documents(NamedTuple):
    """Documents that are made, all of one length.

    Attributes:
        samples: the documents.
        fit: how many of the split's questions fit this length.
        line: what was read and left out, for the screen.
    """

    samples: Sequence[Sample]
    fit: Fit
    line: str

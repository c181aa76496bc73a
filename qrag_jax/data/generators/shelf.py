"""Draws the background of a document as places in books: runs of consecutive sentences."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

RUN = 100  # most consecutive sentences, as in BABILong (Kuratov et al., 2024)


@dataclasses.dataclass(frozen=True, eq=False)
class Shelf:
    """The places of the sentences of several books, without their texts.

    Attributes:
        starts: `[books + 1]` int64, where each book begins; the last entry is the number of places.
    """

    starts: np.ndarray

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the books' limits; a worker computes the runs again."""
        return Shelf, (self.starts,)

    def draw(self, rng: np.random.Generator, count: int, repeats: int = 1) -> np.ndarray:
        """Places of the background of one document, in the order drawn.

        Runs of at most `RUN` consecutive sentences begin at random places of random books.

        Args:
            rng: source of the draws.
            count: number of sentences; at most `repeats` times the number of places.
            repeats: how often one place may be used; 0 for any number.

        Returns:
            `[count]` int64.
        """
        places = self._anywhere.draw(rng, count)
        if repeats:
            places = places[_earlier(places) < repeats]
        found = places[:count]
        while len(found) < count:
            used = np.bincount(found, minlength=len(self))
            free = used < repeats if repeats else used >= 0
            more = self._runs(free).draw(rng, count - len(found))
            if repeats:
                more = more[_earlier(more) + used[more] < repeats]
            found = np.concatenate([found, more[: count - len(found)]])
        return found

    @functools.cached_property
    def _anywhere(self) -> _Runs:
        return self._runs(np.ones(len(self), bool))

    def _runs(self, free: np.ndarray) -> _Runs:
        """The runs over the free places.

        Args:
            free: `[sentences]` bool, whether a place is free.
        """
        # A run ends at the end of its book, or before the next place that is not free.
        ends = np.where(free, len(free), np.arange(len(free)))
        inner = self.starts[1:-1]
        ends[inner - 1] = np.minimum(ends[inner - 1], inner)
        ends = np.minimum.accumulate(ends[::-1])[::-1]
        places = np.flatnonzero(free)
        lengths = np.minimum(ends[places] - places, RUN)
        return _Runs(places, lengths, np.searchsorted(places, self.starts))


class _Runs:
    """Runs of places to draw from.

    Args:
        places: `[free]` where a run may begin, ascending.
        lengths: `[free]` length of the run that begins there.
        firsts: `[books + 1]` where each book begins in `places`.
    """

    def __init__(self, places: np.ndarray, lengths: np.ndarray, firsts: np.ndarray) -> None:
        self._places, self._lengths, self._firsts = places, lengths, firsts
        self._sizes = np.diff(firsts)
        self._books = np.flatnonzero(self._sizes)
        self._typical = lengths.mean()

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws runs with about `count` places or more in all; some places may be drawn twice."""
        runs = int(count / self._typical * 1.1) + 2
        book = self._books[rng.integers(len(self._books), size=runs)]
        spot = self._firsts[book] + rng.integers(self._sizes[book])
        length = self._lengths[spot]
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        return np.repeat(self._places[spot], length) + within


def _earlier(values: np.ndarray) -> np.ndarray:
    """How often each value has appeared earlier in the array, `[values]`."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered)
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values)) - first
    return ranks

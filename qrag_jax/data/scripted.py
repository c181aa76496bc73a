"""What scripts of invented worlds share with the package; the worlds are in `examples/worlds`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

import numpy as np

from qrag_jax.runtime import own_code

BLOCK = 25  # talkative questions whose clauses are about persons in one another's passages
T = TypeVar("T")


@functools.cache
def world(file: str = "scripts.py") -> ModuleType:
    """The code of an invented world: its questions, or what is in another of its files."""
    # Never one of the working folder: nobody named it.
    path = own_code.own_folder(own_code.EXAMPLES) / "worlds" / file
    return own_code.run_file(str(path), "the file of an invented world")


class Draw:
    """Random draws that are the same on every machine.

    Philox fixes its raw 64-bit output; what `numpy.random.Generator` makes of it may change between
    numpy releases.
    """

    def __init__(self, seed: int, stream: int, index: int) -> None:
        key = np.array([seed, stream], dtype=np.uint64)
        counter = np.array([0, 0, 0, index], dtype=np.uint64)
        self._source = np.random.Philox(key=key, counter=counter)
        self._raw: list[int] = []

    def below(self, n: int) -> int:
        """An integer in [0, n); n must be far below 2^64 to make the bias negligible."""
        if not self._raw:  # 256 at a time, used from the last to the first
            self._raw = self._source.random_raw(256).tolist()
        return (self._raw.pop() * n) >> 64

    def chance(self, p: float) -> bool:
        return self.below(1 << 53) < p * (1 << 53)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a uniformly random order (Fisher-Yates)."""
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out

"""Lazy samples: a sequence like any other that makes what it is asked for and keeps nothing."""

from __future__ import annotations

import pytest

from qrag_jax.data.lazy_samples import LazySamples, joined
from qrag_jax.data.sample import Sample


def sample(index: int, source: str = "a") -> Sample:
    return Sample(str(index), "Who?", ("x",), (0,), (), source)


def ids(samples) -> list[str]:
    return [s.id for s in samples]


def test_items_slices_and_iteration() -> None:
    made: list[int] = []

    def make(index: int) -> Sample:
        made.append(index)
        return sample(index)

    samples = LazySamples(10, make)
    assert len(samples) == 10
    assert made == []
    assert samples[3] == samples[-7] == sample(3)
    assert made == [3, 3]
    assert ids(samples) == [str(i) for i in range(10)]
    part = samples[2:9:3]
    assert isinstance(part, LazySamples)
    assert ids(part) == ["2", "5", "8"]
    assert ids(part[::-1]) == ["8", "5", "2"]
    assert ids(reversed(samples[:2])) == ["1", "0"]
    for index in (10, -11):
        with pytest.raises(IndexError):
            samples[index]


def test_joined() -> None:
    lists = [[sample(0), sample(1)], [sample(2, "b")]]
    assert joined(lists) == [sample(0), sample(1), sample(2, "b")]
    lazy = LazySamples(3, lambda i: sample(i, "c"))
    assert joined([lazy]) is lazy
    both = joined([lists[0], lazy, lists[1]])
    assert isinstance(both, LazySamples)
    assert [(s.id, s.source) for s in both] == [
        ("0", "a"),
        ("1", "a"),
        ("0", "c"),
        ("1", "c"),
        ("2", "c"),
        ("2", "b"),
    ]
    assert both[-1] == sample(2, "b")

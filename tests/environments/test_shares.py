"""Shares: what sums to 1, and that draws meet them."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import pytest

from qrag_jax.data.generators.invented_names import Draw
from qrag_jax.environments.shares import check_shares, drawn
from qrag_jax.errors import InputError

DRAWS = 4000


class Shares(NamedTuple):
    a: float = 0.5
    b: float = 0.3
    c: float = 0.2
    other: float = 7.0


def test_names_are_drawn_by_their_shares() -> None:
    shares = {"a": 0.5, "none": 0.0, "b": 0.3, "c": 0.2, "last": 0.0}
    counts = Counter(drawn(shares, Draw(0, 99, index)) for index in range(DRAWS))
    assert counts.keys() == {"a", "b", "c"}
    for name in counts:
        sigma = math.sqrt(DRAWS * shares[name] * (1 - shares[name]))
        assert abs(counts[name] - DRAWS * shares[name]) < 4 * sigma, name


def test_a_draw_takes_one_number() -> None:
    draw, other = Draw(0, 99, 0), Draw(0, 99, 0)
    drawn({"a": 0.5, "b": 0.5}, draw)
    other.below(2)
    assert [draw.below(1000) for _ in range(5)] == [other.below(1000) for _ in range(5)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Shares(c=0.3), "config.styles.a, b and c sum to 1.1; change them so that they sum to 1."),
        (Shares(a=0.8, b=0.5, c=-0.3), "config.styles.c is -0.3; it must be at least 0.0."),
        (Shares(a=math.nan), "config.styles.a is nan; it must be at least 0.0."),
    ],
)
def test_shares_that_are_refused(given: Shares, told: str) -> None:
    check_shares("styles", Shares(), ("a", "b", "c"))
    with pytest.raises(InputError) as caught:
        check_shares("styles", given, ("a", "b", "c"))
    assert str(caught.value) == told

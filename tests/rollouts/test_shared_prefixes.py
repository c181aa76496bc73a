"""What prompts have in common, beside all ways to cut them into runs."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qrag_jax.rollouts.shared_prefixes import shared_prefixes


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def fewest_chunks(prompts: list[np.ndarray], most: int, chunk: int) -> int:
    """Chunks of the longest rest, by the best of all cuts into at most so many runs."""
    best = math.inf
    for cuts in range(most):
        for places in itertools.combinations(range(1, len(prompts)), cuts):
            longest = 0
            for first, end in itertools.pairwise((0, *places, len(prompts))):
                run = prompts[first:end]
                prefix = min(map(len, run)) - 1
                while any(p[:prefix].tolist() != run[0][:prefix].tolist() for p in run):
                    prefix -= 1
                longest = max(longest, max(map(len, run)) - prefix)
            best = min(best, math.ceil(longest / chunk))
    return int(best)


@given(
    prompts=st.lists(
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        min_size=1,
        max_size=7,
        unique_by=tuple,
    ),
    most=st.integers(1, 3),
    chunk=st.integers(1, 3),
)
def test_the_longest_rest_is_as_short_as_can_be(
    prompts: list[list[int]], most: int, chunk: int
) -> None:
    arrays = sorted((ids(*each) for each in prompts), key=lambda each: each.tobytes())
    runs = shared_prefixes(arrays, most, chunk)
    assert sum(number for number, _ in runs) == len(arrays)
    assert len(runs) <= most
    left, rests = arrays, []
    for number, prefix in runs:
        run, left = left[:number], left[number:]
        assert all(each[:prefix].tolist() == run[0][:prefix].tolist() for each in run)
        rests += [len(each) - prefix for each in run]
    assert min(rests) > 0
    fewest = fewest_chunks(arrays, most, chunk)
    whole = math.ceil(max(map(len, arrays)) / chunk)
    if runs != [(len(arrays), 0)]:
        assert math.ceil(max(rests) / chunk) == fewest
        shared = most * math.ceil(max(prefix for _, prefix in runs) / chunk)
        assert shared + len(arrays) * fewest < len(arrays) * whole


def test_prompts_of_two_kinds() -> None:
    one, two = range(10, 20), range(30, 36)
    prompts = [ids(*one, n) for n in range(5)] + [ids(*two, n, n) for n in range(4)]
    assert shared_prefixes(prompts, 2, 4) == [(5, 10), (4, 6)]
    # Of one run they share nothing.
    assert shared_prefixes(prompts, 1, 4) == [(9, 0)]


def test_two_prompts_are_not_read_as_prefixes() -> None:
    assert shared_prefixes([ids(1, 2, 3, 4, 5), ids(1, 2, 3, 4, 6)], 4, 1) == [(2, 0)]
    assert shared_prefixes([], 4, 1) == []

"""Packed blocks against bin filling written out by hand."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.packing import (
    Blocks,
    Filling,
    choose_blocks,
    choose_lengths,
    from_rows,
    next_block,
    packed_layout,
    padded_layout,
    rows_of_block,
    to_rows,
)

LENGTHS = np.array([3, 0, 5, 1, 0], np.int32)
TOKENS, LENGTH = 12, 6
BLOCKS = Blocks((24, 48), (8, 20), (5.0, 14.0))


def places_by_hand(lengths: np.ndarray) -> list[tuple[int, int]]:
    """(row, position) of every used place."""
    return [(row, position) for row, n in enumerate(lengths) for position in range(n)]


def test_layout_puts_rows_end_to_end() -> None:
    layout = packed_layout(jnp.asarray(LENGTHS), TOKENS, LENGTH)
    used = places_by_hand(LENGTHS)
    found = list(zip(layout.row.tolist(), layout.position.tolist(), strict=True))
    assert found[: len(used)] == used
    assert [row for row, _ in found[len(used) :]] == [len(LENGTHS)] * (TOKENS - len(used))
    for place, (row, position) in enumerate(used):
        assert layout.place[row, position] == place
    # Places that no row uses have a position that every encoder knows.
    wide = packed_layout(jnp.asarray(LENGTHS), TOKENS, length=64)
    assert wide.position.max() == LENGTHS.max() - 1


@pytest.mark.parametrize("full", [False, True])
def test_rows_and_back(full) -> None:
    lengths = np.array([6, 6], np.int32) if full else LENGTHS
    layout = packed_layout(jnp.asarray(lengths), TOKENS, LENGTH)
    packed = np.random.default_rng(0).standard_normal((TOKENS, 4)).astype(np.float32)
    rows = np.asarray(to_rows(packed, layout))
    assert rows.shape == (len(lengths), LENGTH, 4)
    used = places_by_hand(lengths)
    for place, (row, position) in enumerate(used):
        np.testing.assert_array_equal(rows[row, position], packed[place])
    back = np.asarray(from_rows(rows, layout))
    np.testing.assert_array_equal(back[: len(used)], packed[: len(used)])
    np.testing.assert_array_equal(back[len(used) :], 0)


def test_gradients_of_the_moves_are_those_of_the_indexing() -> None:
    layout = packed_layout(jnp.asarray(LENGTHS), TOKENS, LENGTH)
    rng = np.random.default_rng(1)
    inside = (np.arange(LENGTH) < LENGTHS[:, None])[..., None]
    packed = rng.standard_normal((TOKENS, 3)).astype(np.float32)
    rows = rng.standard_normal((len(LENGTHS), LENGTH, 3)).astype(np.float32)
    of_rows = rng.standard_normal(rows.shape).astype(np.float32) * inside
    of_packed = rng.standard_normal(packed.shape).astype(np.float32)

    found = jax.vjp(lambda x: to_rows(x, layout), packed)[1](of_rows)[0]
    expected = jax.vjp(lambda x: x[layout.place], packed)[1](of_rows)[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)

    expected = np.zeros_like(rows)
    for place, (row, position) in enumerate(places_by_hand(LENGTHS)):
        expected[row, position] = of_packed[place]
    found = jax.vjp(lambda x: from_rows(x, layout), rows)[1](of_packed)[0]
    np.testing.assert_array_equal(found, expected)


def test_padded_layout_is_a_flat_array_of_padded_rows() -> None:
    layout = padded_layout(jnp.asarray(LENGTHS), LENGTH)
    flat = np.arange(len(LENGTHS) * LENGTH * 2.0).reshape(-1, 2).astype(np.float32)
    np.testing.assert_array_equal(to_rows(flat, layout), flat.reshape(-1, LENGTH, 2))
    inside = (np.arange(LENGTH) < LENGTHS[:, None]).reshape(-1, 1)
    np.testing.assert_array_equal(from_rows(to_rows(flat, layout), layout), flat * inside)


def filled_by_hand(blocks: Blocks, lengths: list[int]) -> list[tuple[int, int, list[int]]]:
    """Tokens, row length and row lengths of each block; longest first, then shortest that fit."""
    left, filled = sorted(n for n in lengths if n), []
    while left:
        column = next(i for i, n in enumerate(blocks.lengths) if n >= left[-1])
        shapes = [s for s in blocks.shapes(len(lengths)) if s.length == blocks.lengths[column]]
        enough = [s for s in shapes if s.tokens >= sum(left) and s.rows >= len(left)]
        shape = (enough or shapes[-1:])[0]
        taken: list[int] = []
        for end in (-1, 0):
            while left and len(taken) < shape.rows and sum(taken) + left[end] <= shape.tokens:
                taken.append(left.pop(end))
        filled.append((shape.tokens, shape.length, taken))
    return filled


@pytest.mark.parametrize("count", [1, 2, 7, 13, 19])
def test_blocks_are_filled_longest_first_then_from_below(count) -> None:
    rng = np.random.default_rng(count)
    lengths = np.sort(rng.integers(0, 21, count)).astype(np.int32)
    shapes = list(BLOCKS.shapes(count))
    following = jax.jit(next_block, static_argnums=0)
    left = Filling(jnp.int32((lengths == 0).sum()), jnp.int32(count))
    found, seen = [], []
    while left.low < left.high:
        block = following(BLOCKS, jnp.asarray(lengths), left)
        shape = shapes[int(block.shape)]
        place, present = rows_of_block(block, left, shape.rows)
        rows = np.asarray(place)[np.asarray(present)]
        found.append((shape.tokens, shape.length, lengths[rows].tolist()))
        seen += rows.tolist()
        left = Filling(left.low + block.bottom, left.high - block.top)
    assert found == filled_by_hand(BLOCKS, lengths.tolist())
    assert sorted(seen) == np.flatnonzero(lengths).tolist()  # every row once


def test_choose_blocks_holds_the_longest_row_and_grows_by_doubling() -> None:
    histogram = np.zeros(41, np.int64)
    histogram[[5, 7, 20, 40]] = 30, 10, 4, 1
    blocks = choose_blocks(histogram, tokens=160, lengths=2, sizes=3)
    assert blocks.tokens == (40, 80, 160)
    assert blocks.lengths == (8, 40)
    np.testing.assert_allclose(blocks.mean_lengths, (5.5, 24.0))
    # Two of the longest rows fit even where fewer tokens are asked for.
    assert choose_blocks(histogram, tokens=16, lengths=2, sizes=2).tokens == (40, 80)
    assert choose_blocks(histogram, tokens=80, lengths=1, sizes=4).tokens == (40, 80)


def cost(histogram: np.ndarray, lengths: tuple[int, ...]) -> int:
    """Tokens computed when every row is padded to its length; an absent row costs nothing."""
    rows = [(n, int(count)) for n, count in enumerate(histogram) if n]
    return sum(count * min(x for x in lengths if x >= n) for n, count in rows)


def cheapest(histogram: np.ndarray, count: int) -> int:
    """The least cost of all sets of at most `count` multiples of 8, the longest row included."""
    longest = -(-(len(histogram) - 1) // 8) * 8
    inner = range(8, longest, 8)
    sets = itertools.chain.from_iterable(
        itertools.combinations(inner, size) for size in range(min(count, len(inner) + 1))
    )
    return min(cost(histogram, (*chosen, longest)) for chosen in sets)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_choose_lengths_is_optimal(count) -> None:
    rng = np.random.default_rng(count)
    for longest in (3, 8, 9, 30, 41, 56):
        for _ in range(4):
            histogram = np.concatenate([[0], rng.integers(0, 50, longest) ** 2])
            lengths = choose_lengths(histogram, count)
            assert len(lengths) <= count
            assert lengths == tuple(sorted(set(lengths)))
            assert lengths[-1] - longest in range(8)
            assert all(length % 8 == 0 for length in lengths)
            assert cost(histogram, lengths) == cheapest(histogram, count)
    histogram = np.zeros(41, np.int64)
    histogram[0], histogram[20], histogram[40] = 1000, 10, 10  # rows of no tokens cost nothing
    assert choose_lengths(histogram, 2) == (24, 40)


def test_rounder_lengths_are_taken_where_they_cost_little() -> None:
    """As accelerators want them: multiples of 64, or of 8 where 64 costs 2 % more tokens."""
    even, uneven = np.zeros(288, np.int64), np.zeros(288, np.int64)
    even[128], uneven[72] = 100, 100

    def lengths(histogram: np.ndarray) -> tuple[int, ...]:
        return choose_blocks(histogram, 8192, 2, 2, multiples=(64, 8)).lengths

    assert lengths(even) == (128, 320)
    assert lengths(uneven) == (72, 288)

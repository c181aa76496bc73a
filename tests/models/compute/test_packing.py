"""Packed blocks against bin filling written out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.packing import (
    Blocks,
    Filling,
    choose_blocks,
    from_rows,
    next_block,
    packed_layout,
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

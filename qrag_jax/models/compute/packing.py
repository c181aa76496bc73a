"""Rows of unequal length packed end to end into blocks of a few static sizes.

In a block of T places every token stands behind the other, so linear maps compute no padding but
the block's own end; only attention sees rows of L padded tokens. Blocks are filled on the device:
the longest rows first, then the shortest into the room that is left. Shapes never depend on the
data, so nothing recompiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.models.compute.dropout import TokenDropout, at_depth


class Shape(NamedTuple):
    """Static sizes of a block: T places, at most R rows of at most L tokens."""

    tokens: int
    length: int
    rows: int


class Blocks(NamedTuple):
    """The shapes that blocks come in: every size with every row length, all ascending.

    `mean_lengths[i]` is how long rows of up to `lengths[i]` tokens (but longer than the length
    before) are on average; it decides how many of them a block has room for.
    """

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    mean_lengths: tuple[float, ...]

    def shapes(self, count: int) -> Iterator[Shape]:
        """Every shape for `count` rows in all, sizes outermost."""
        for tokens in self.tokens:
            for length, mean in zip(self.lengths, self.mean_lengths, strict=True):
                # A tenth more than expected: a block is rarely full of rows before it is of tokens.
                yield Shape(tokens, length, max(1, min(count, math.ceil(1.1 * tokens / mean))))


class Layout(NamedTuple):
    """Where the tokens of one block stand: T places, R rows of L.

    row `[T]`: the row a place belongs to, R where it is unused. position `[T]`: the token's
    position in its row. place `[R, L]`: the place of each token of a row; anywhere beyond its end.
    lengths `[R]`: 0 = no such row. dropout: where adapters or the trunk have any.
    """

    row: jax.Array
    position: jax.Array
    place: jax.Array
    lengths: jax.Array
    dropout: TokenDropout | None = None

    def at_depth(self, depth: int) -> Layout:
        """As what stands there takes it: 0 before all layers, n in layer n - 1."""
        return self._replace(dropout=at_depth(self.dropout, depth))


def packed_layout(lengths: jax.Array, tokens: int, length: int) -> Layout:
    """Rows of `lengths` `[R]` (at most `length`) end to end in `tokens` places, which hold them."""
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    place = jnp.arange(tokens)
    row = (place[:, None] >= ends).sum(axis=1)
    position = place - starts[jnp.minimum(row, len(lengths) - 1)]
    return Layout(
        row=row,
        position=jnp.clip(position, 0, length - 1),
        place=jnp.clip(starts[:, None] + jnp.arange(length), 0, tokens - 1),
        lengths=lengths,
    )


def padded_layout(lengths: jax.Array, length: int) -> Layout:
    """Rows padded on the right to `length`: the layout of a `[R, length]` array made flat."""
    lengths, rows = jnp.asarray(lengths), jnp.arange(len(lengths))
    row = jnp.repeat(rows, length)
    position = jnp.tile(jnp.arange(length), len(lengths))
    inside = position < lengths[row]
    place = rows[:, None] * length + jnp.arange(length)
    return Layout(jnp.where(inside, row, len(lengths)), position, place, lengths)


@jax.custom_vjp
def to_rows(packed: jax.Array, layout: Layout) -> jax.Array:
    """`[T, D]` → `[R, L, D]`, arbitrary but finite beyond the end of a row."""
    return packed[layout.place]


@jax.custom_vjp
def from_rows(rows: jax.Array, layout: Layout) -> jax.Array:
    """`[R, L, D]` → `[T, D]`, 0 at unused places; the inverse of `to_rows`."""
    count, length, width = rows.shape
    used = layout.row < count
    flat = jnp.where(used, layout.row * length + layout.position, 0)
    return jnp.where(used[:, None], rows.reshape(-1, width)[flat], 0)


# Every used place goes to exactly one row and back: both gradients are gathers, where autodiff
# would scatter.
def _to_rows_backward(layout: Layout, gradient: jax.Array) -> tuple[jax.Array, None]:
    return from_rows(gradient, layout), None


def _from_rows_backward(layout: Layout, gradient: jax.Array) -> tuple[jax.Array, None]:
    inside = jnp.arange(layout.place.shape[1]) < layout.lengths[:, None]
    return jnp.where(inside[..., None], gradient[layout.place], 0), None


to_rows.defvjp(lambda packed, layout: (to_rows(packed, layout), layout), _to_rows_backward)
from_rows.defvjp(lambda rows, layout: (from_rows(rows, layout), layout), _from_rows_backward)


class Filling(NamedTuple):
    """How far the filling of blocks has come: rows `low` to `high - 1`, by length, are left."""

    low: jax.Array
    high: jax.Array


class Block(NamedTuple):
    """What one block takes: the `top` longest rows left and the `bottom` shortest ones.

    `shape` is the index of its shape among `Blocks.shapes`.
    """

    shape: jax.Array
    top: jax.Array
    bottom: jax.Array


def next_block(blocks: Blocks, lengths: jax.Array, left: Filling) -> Block:
    """The block to compute next for rows of ascending `lengths` `[N]`.

    It has the least row length that holds the longest row left, and the least size that holds all
    that is left, else the largest.
    """
    shapes = list(blocks.shapes(lengths.shape[0]))
    tokens, most_rows = (
        jnp.array([getattr(shape, name) for shape in shapes]).reshape(len(blocks.tokens), -1)
        for name in ("tokens", "rows")
    )
    before = jnp.append(0, jnp.cumsum(lengths))  # tokens of all rows before each
    low, high = left
    count = high - low
    column = (jnp.array(blocks.lengths) < lengths[high - 1]).sum()
    tokens, most_rows = tokens[:, column], most_rows[:, column]
    holds_all = (tokens >= before[high] - before[low]) & (most_rows >= count)
    size = jnp.where(holds_all.any(), jnp.argmax(holds_all), len(blocks.tokens) - 1)
    room, most = tokens[size], jnp.minimum(most_rows[size], count)
    # From this row on, everything up to `high` fits.
    first = (before < before[high] - room).sum()
    top = jnp.minimum(high - first, most)
    room = room - (before[high] - before[high - top])
    fits = (before <= before[low] + room).sum() - 1 - low
    bottom = jnp.clip(fits, 0, most - top)
    return Block(size * len(blocks.lengths) + column, top, bottom)


def rows_of_block(block: Block, left: Filling, most: int) -> tuple[jax.Array, jax.Array]:
    """The rows a block takes, as places in the order by length `[most]`, and which are present."""
    number = jnp.arange(most)
    place = jnp.where(number < block.top, left.high - 1 - number, left.low + number - block.top)
    present = number < block.top + block.bottom
    return jnp.where(present, place, 0), present


def choose_blocks(
    histogram: Sequence[int] | np.ndarray, tokens: int, lengths: int, sizes: int
) -> Blocks:
    """Blocks for rows whose lengths are spread like `histogram` (see `choose_lengths`).

    Args:
        tokens: places of the largest block; more if two of the longest rows need more.
        lengths: row lengths at most. sizes: block sizes, each half of the next.
    """
    histogram = np.array(histogram, np.int64)
    longest = len(histogram) - 1
    chosen = choose_lengths(histogram, lengths)
    means = []
    for low, high in zip((0, *chosen), chosen, strict=False):
        counts = histogram[low + 1 : high + 1]
        total = counts.sum()
        found = np.arange(low + 1, high + 1) @ counts / total if total else high
        means.append(float(found))
    tokens = max(tokens, 2 * longest)
    ladder = sorted({max(-(-tokens // 2**i), longest) for i in range(sizes)})
    return Blocks(tuple(ladder), chosen, tuple(means))


def choose_lengths(histogram: Sequence[int] | np.ndarray, count: int) -> tuple[int, ...]:
    """The ≤ `count` row lengths that waste the fewest tokens on rows of given lengths.

    `histogram[n]` is how many rows have n tokens; the last index is the longest row allowed and
    always chosen. Exact by dynamic programming over multiples of 8.
    """
    histogram = np.array(histogram, np.int64)
    histogram[0] = 0  # absent rows cost nothing
    longest = len(histogram) - 1
    edges = sorted({*range(8, longest, 8), longest})
    rows_up_to = np.cumsum(histogram)[edges]
    # cost[j]: fewest tokens for all rows that fit edge j, when edge j is chosen.
    cost = rows_up_to * np.array(edges)
    paths: list[tuple[int, ...]] = [(edge,) for edge in edges]
    for _ in range(count - 1):
        new_cost, new_paths = cost.copy(), list(paths)
        for j, edge in enumerate(edges):
            for i in range(j):
                split = cost[i] + (rows_up_to[j] - rows_up_to[i]) * edge
                if split < new_cost[j]:
                    new_cost[j], new_paths[j] = split, (*paths[i], edge)
        cost, paths = new_cost, new_paths
    return paths[-1]

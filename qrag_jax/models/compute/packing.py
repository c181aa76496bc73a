"""Packs rows of unequal length end to end into blocks of a few static sizes.

In a block of T places the tokens of all rows follow each other. So linear maps compute padding only
at the end of the block; only attention sees rows padded to L tokens. Blocks are filled on the
device: first with the longest rows, then with the shortest rows that fit into the remaining room.
Shapes never depend on the data, so nothing is recompiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.models.compute.dropout import TokenDropout, at_depth

# A share of padded tokens that longer, rounder rows may cost.
FEW = 0.02


class Shape(NamedTuple):
    """Static sizes of a block: T places, at most R rows of at most L tokens."""

    tokens: int
    length: int
    rows: int


class Blocks(NamedTuple):
    """The shapes of blocks: every size with every row length, both ascending.

    `mean_lengths[i]` is the mean length of rows that have at most `lengths[i]` tokens but more than
    `lengths[i - 1]`. It decides how many such rows a block has room for.
    """

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    mean_lengths: tuple[float, ...]

    def shapes(self, count: int) -> Iterator[Shape]:
        """Every shape for `count` rows in total; the size varies slowest."""
        for tokens in self.tokens:
            for length, mean in zip(self.lengths, self.mean_lengths, strict=True):
                # A tenth more rows than expected: a block rarely fills up with rows before tokens.
                yield Shape(tokens, length, max(1, min(count, math.ceil(1.1 * tokens / mean))))


class Layout(NamedTuple):
    """Where the tokens of one block are: T places, R rows of L tokens."""

    row: jax.Array  # `[T]`, the row that a place belongs to; R if the place is unused
    position: jax.Array  # `[T]`, the token's position in its row
    place: jax.Array  # `[R, L]`, the place of each token of a row; arbitrary beyond the row's end
    lengths: jax.Array  # `[R]`, tokens of each row; 0: there is no such row
    dropout: TokenDropout | None = None  # dropout of adapters or of the trunk, if there is any
    # which tokens have one place for several rows; None: no row shares a place
    shared: Shared | None = None
    # the number of the layer that gets this layout, from 1; 0 is before all layers. None: the
    # layout is not that of one depth
    depth: int | jax.Array | None = None

    def at_depth(self, depth: int | jax.Array) -> Layout:
        """The layout of one depth, with its dropout keys: 0 before all layers, n in layer n - 1."""
        return self._replace(dropout=at_depth(self.dropout, depth), depth=depth)


class Shared(NamedTuple):
    """Tokens that all rows of a group of neighbours begin with, see `sharing`.

    Each of them has one place, which belongs to the group's first row.
    """

    counts: jax.Array  # `[groups]`, their number in each group of R / groups rows
    # the layout of these alone, one row a group; None: they are not looked at alone
    prompts: Layout | None = None
    own: Layout | None = None  # the layout of what rows have behind them


def packed_layout(lengths: jax.Array, tokens: int, length: int) -> Layout:
    """The layout of rows of `lengths` `[R]` (each at most `length`), end to end in `tokens` places.

    The places must suffice for all rows.
    """
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    place = jnp.arange(tokens)
    row = (place[:, None] >= ends[None]).sum(axis=1)
    position = place - starts[jnp.minimum(row, len(lengths) - 1)]
    return Layout(
        row=row,
        # Unused places have position 0: rows may be padded beyond the encoder's last position.
        position=jnp.where(row < len(lengths), position, 0),
        place=jnp.clip(starts[:, None] + jnp.arange(length)[None], 0, tokens - 1),
        lengths=lengths,
    )


def padded_layout(lengths: jax.Array, length: int) -> Layout:
    """The layout of a flattened `[R, length]` array: rows padded on the right to `length`."""
    lengths, rows = jnp.asarray(lengths), jnp.arange(len(lengths))
    row = jnp.repeat(rows, length)
    position = jnp.tile(jnp.arange(length), len(lengths))
    inside = position < lengths[row]
    place = rows[:, None] * length + jnp.arange(length)[None]
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


# Both gradients are gathers; autodiff would use scatters. A place belongs to exactly one row, or to
# all rows of its group.
def _to_rows_backward(layout: Layout, gradient: jax.Array) -> tuple[jax.Array, None]:
    own = from_rows(gradient, layout)
    if layout.shared is None:
        return own, None
    counts = layout.shared.counts
    groups, (count, length, width) = len(counts), gradient.shape
    inside = jnp.arange(length)[None] < layout.lengths[:, None]
    known = jnp.where(inside[..., None], gradient, 0)
    total = known.reshape(groups, count // groups, length, width).sum(axis=1)
    group = jnp.minimum(layout.row // (count // groups), groups - 1)
    in_common = (layout.position < counts[group]) & (layout.row < count)
    return jnp.where(in_common[:, None], total[group, layout.position], own), None


def _from_rows_backward(layout: Layout, gradient: jax.Array) -> tuple[jax.Array, None]:
    number = jnp.arange(layout.place.shape[1])[None]
    inside = number < layout.lengths[:, None]
    if layout.shared is not None:
        counts = layout.shared.counts
        members = len(layout.lengths) // len(counts)
        is_first = jnp.arange(len(layout.lengths)) % members == 0
        inside &= is_first[:, None] | (number >= jnp.repeat(counts, members)[:, None])
    return jnp.where(inside[..., None], gradient[layout.place], 0), None


to_rows.defvjp(lambda packed, layout: (to_rows(packed, layout), layout), _to_rows_backward)
from_rows.defvjp(lambda rows, layout: (from_rows(rows, layout), layout), _from_rows_backward)


class Filling(NamedTuple):
    """The rows that no block has taken yet: `low` to `high - 1` in the order by length."""

    low: jax.Array
    high: jax.Array


class Block(NamedTuple):
    """The rows that one block takes: the `top` longest and the `bottom` shortest of the rows left.

    `shape` is the index of the block's shape in `Blocks.shapes`.
    """

    shape: jax.Array
    top: jax.Array
    bottom: jax.Array


def next_block(blocks: Blocks, lengths: jax.Array, left: Filling) -> Block:
    """The block to compute next for rows of ascending `lengths` `[N]`.

    Its row length is the smallest that holds the longest row left. Its size is the smallest that
    holds all rows left, or the largest size if none holds them.
    """
    shapes = list(blocks.shapes(lengths.shape[0]))
    tokens, most_rows = (
        jnp.array([getattr(shape, name) for shape in shapes]).reshape(len(blocks.tokens), -1)
        for name in ("tokens", "rows")
    )
    before = jnp.append(0, jnp.cumsum(lengths))  # tokens of all rows before each row
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
    """A block's rows, as places in the order by length `[most]`, and which of them are present."""
    number = jnp.arange(most)
    place = jnp.where(number < block.top, left.high - 1 - number, left.low + number - block.top)
    present = number < block.top + block.bottom
    return jnp.where(present, place, 0), present


def choose_blocks(
    histogram: Sequence[int] | np.ndarray,
    tokens: int,
    lengths: int,
    sizes: int,
    *,
    multiples: Sequence[int] = (8,),
) -> Blocks:
    """Chooses blocks for rows whose lengths are distributed as in `histogram`.

    Args:
        histogram: number of rows of each length (see `choose_lengths`).
        tokens: places of the largest block; more if two of the longest rows need more.
        lengths: the most row lengths to choose.
        sizes: the most block sizes to choose. Each size is half of the next, but none is smaller
            than the longest row.
        multiples: what row lengths may be multiples of, best first. The first one is taken that
            costs at most `FEW` more padded tokens than the last one.
    """
    histogram = np.array(histogram, np.int64)
    best = choose_lengths(histogram, lengths, multiples[-1])
    allowed = (1 + FEW) * padded_tokens(histogram, best)
    for multiple in multiples:
        chosen = choose_lengths(histogram, lengths, multiple)
        if padded_tokens(histogram, chosen) <= allowed:
            break
    longest = chosen[-1]
    histogram = np.pad(histogram, (0, longest + 1 - len(histogram)))
    means = []
    for low, high in zip((0, *chosen), chosen, strict=False):
        counts = histogram[low + 1 : high + 1]
        total = counts.sum()
        found = np.arange(low + 1, high + 1) @ counts / total if total else high
        means.append(float(found))
    tokens = max(tokens, 2 * longest)
    ladder = sorted({max(-(-tokens // 2**i), longest) for i in range(sizes)})
    return Blocks(tuple(ladder), chosen, tuple(means))


def padded_tokens(histogram: np.ndarray, lengths: Sequence[int]) -> int:
    """Tokens of all rows when each is padded to the next of `lengths`; no row: no tokens."""
    numbers = np.arange(1, len(histogram))
    return int(histogram[1:] @ np.array(lengths)[np.searchsorted(lengths, numbers)])


def choose_lengths(
    histogram: Sequence[int] | np.ndarray, count: int, multiple: int = 8
) -> tuple[int, ...]:
    """At most `count` row lengths that need the fewest tokens, padding included.

    All are multiples of `multiple`: cuDNN's attention refuses odd lengths. `histogram[n]` is the
    number of rows with n tokens; its last index is the longest row allowed, for which there is
    always room. Dynamic programming finds the optimum.
    """
    histogram = np.array(histogram, np.int64)
    histogram[0] = 0  # absent rows cost nothing
    longest = -(-(len(histogram) - 1) // multiple) * multiple
    edges = list(range(multiple, longest + 1, multiple))
    rows_up_to = np.cumsum(histogram)[np.minimum(edges, len(histogram) - 1)]
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

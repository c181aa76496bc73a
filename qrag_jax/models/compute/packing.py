"""Packs rows of unequal length end to end into blocks of a few static sizes.

In a block of T places the tokens of all rows follow each other. So linear maps compute padding only
at the end of the block; only attention sees rows padded to L tokens. Blocks are filled on the
device: first with the longest rows, then with the shortest rows that fit into the remaining room.
Shapes never depend on the data, so nothing is recompiled.

Rows may begin with the same tokens, such as the episodes of one question. The tokens that a group
of rows begins with have one place each, and all that is computed token by token runs over P + G·R
places instead of G·(P + R). In a causal model the hidden states are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.models.compute.dropout import TokenDropout

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
        dropout = None if self.dropout is None else self.dropout.at_depth(depth)
        return self._replace(dropout=dropout, depth=depth)


class Shared(NamedTuple):
    """Tokens that all rows of a group of neighbours begin with.

    Each of them has one place, which belongs to the group's first row. That row is present if any
    row of the group is.
    """

    counts: jax.Array  # `[groups]`, their number in each group of R / groups rows
    # The layouts of these alone, one row a group, and of what rows have behind them; None:
    # attention is not computed in parts
    prompts: Layout | None = None
    own: Layout | None = None


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
    gathered = from_rows(gradient, layout)
    if layout.shared is None:
        return gathered, None
    counts = layout.shared.counts
    groups, (count, length, width) = len(counts), gradient.shape
    inside = jnp.arange(length)[None] < layout.lengths[:, None]
    known = jnp.where(inside[..., None], gradient, 0)
    total = known.reshape(groups, count // groups, length, width).sum(axis=1)
    group = jnp.minimum(layout.row // (count // groups), groups - 1)
    in_common = (layout.position < counts[group]) & (layout.row < count)
    return jnp.where(in_common[:, None], total[group, layout.position], gathered), None


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


def next_block(
    shapes: Sequence[Shape], lengths: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, ...]:
    """The block to compute next for the rows `low` to `high - 1` of ascending `lengths` `[N]`.

    Its row length is the smallest that holds the longest row left. Its size is the smallest that
    holds all rows left, or the largest size if none holds them.

    Args:
        shapes: those of `Blocks.shapes`, R rows at most.

    Returns:
        The index of its shape; its rows, the longest and the shortest of those left, as places in
        the order by length `[R]`, and which of them are present; the new `low` and `high`.
    """
    rows_of = sorted({shape.length for shape in shapes})
    tokens, most_rows = (
        jnp.array([getattr(shape, name) for shape in shapes]).reshape(-1, len(rows_of))
        for name in ("tokens", "rows")
    )
    before = jnp.append(0, jnp.cumsum(lengths))  # tokens of all rows before each row
    column = (jnp.array(rows_of) < lengths[high - 1]).sum()
    tokens, most_rows = tokens[:, column], most_rows[:, column]
    holds_all = (tokens >= before[high] - before[low]) & (most_rows >= high - low)
    size = jnp.where(holds_all.any(), jnp.argmax(holds_all), len(tokens) - 1)
    room, most = tokens[size], jnp.minimum(most_rows[size], high - low)
    # From this row on, everything up to `high` fits.
    first = (before < before[high] - room).sum()
    longest = jnp.minimum(high - first, most)
    room = room - (before[high] - before[high - longest])
    fits = (before <= before[low] + room).sum() - 1 - low
    shortest = jnp.clip(fits, 0, most - longest)
    number = jnp.arange(max(shape.rows for shape in shapes))
    place = jnp.where(number < longest, high - 1 - number, low + number - longest)
    present = number < longest + shortest
    place = jnp.where(present, place, 0)
    # Under jax_enable_x64 sums of whole numbers have 64 bits.
    low, high = (low + shortest).astype(jnp.int32), (high - longest).astype(jnp.int32)
    return size * len(rows_of) + column, place, present, low, high


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
        mean = np.arange(low + 1, high + 1) @ counts / total if total else high
        means.append(float(mean))
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
    edges = np.arange(multiple, longest + 1, multiple)
    rows_up_to = np.cumsum(histogram)[np.minimum(edges, len(histogram) - 1)]
    # cost[j]: fewest tokens for all rows that fit edge j, when edge j is chosen.
    cost = rows_up_to * edges
    chosen: list[tuple[int, ...]] = [(int(edge),) for edge in edges]
    below = edges[:, None] < edges
    for _ in range(count - 1):
        # [i, j]: those up to edge i as before, the others up to edge j padded to it
        split = np.where(below, cost[:, None] + (rows_up_to - rows_up_to[:, None]) * edges, cost)
        of = split.argmin(axis=0)
        better = split.min(axis=0) < cost
        chosen = [
            (*chosen[of[j]], int(edge)) if better[j] else chosen[j] for j, edge in enumerate(edges)
        ]
        cost = split.min(axis=0)
    return chosen[-1]


# ---------------------------------------------------------------------- sums of rows by index
# The gradient of a look-up. On a GPU such a scatter adds in the order in which threads arrive, so
# in another order every time. XLA's deterministic form of it (`runtime.platform`) sorts every
# single number: 8,192 rows of 768 are 6.3 million triples of 12 bytes. Here only the indices are
# sorted; a prefix sum in log2(rows) steps then adds the rows of equal indices, and the scatter that
# is left has each index once.


def add_rows(table: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[at].add(rows)`, in an order that is the same in every run on every platform.

    A CPU uses the scatter itself, which is quickest there and adds in the order of the rows. Other
    platforms add in pairs; so their sums differ from those by float32 rounding.

    Args:
        table: `[V, D]`.
        at: `[T]`, at least 0; a row whose index is V or more is left out.
        rows: `[T, D]`, in the dtype of the table.

    Returns:
        `[V, D]`.
    """
    return jax.lax.platform_dependent(table, at, rows, cpu=_scattered, default=_sorted_sums)


def _scattered(table: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[at].add(rows, mode="drop")


def _sorted_sums(table: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    count = at.shape[0]
    order = jnp.argsort(at, stable=True)
    at, sums = at[order], rows[order]
    reach = 1
    while reach < count:  # sums[i] holds the rows of its index among the last `reach` ones up to i
        same = jnp.pad(at[reach:] == at[:-reach], (reach, 0))
        before = jnp.pad(sums[:-reach], ((reach, 0), (0, 0)))
        sums = sums + jnp.where(same[:, None], before, 0)
        reach *= 2
    last = jnp.append(at[1:] != at[:-1], True)
    size = table.shape[0]
    # All others get indices of their own behind the table, which are left out.
    once = jnp.where(last & (at < size), at, size + jnp.arange(count, dtype=at.dtype))
    return table.at[once].add(sums, mode="drop", unique_indices=True)


@jax.custom_vjp
def take_rows(table: jax.Array, at: jax.Array) -> jax.Array:
    """`table[at]`, whose gradient adds in a fixed order (`add_rows`).

    The table is `[V, D]`, at `[T]` from 0 to V - 1.
    """
    return table[at]


def _take_rows_backward(saved: tuple[Any, jax.Array], gradient: jax.Array) -> tuple[Any, None]:
    table, at = saved
    return add_rows(jnp.zeros_like(table), at, gradient), None


take_rows.defvjp(lambda table, at: (table[at], (table, at)), _take_rows_backward)

"""Embeds rows of unequal length, and computes gradients, with little padding in ONE program.

The compiled program sorts rows by length on the device and packs them into blocks (`packing`). A
loop computes the blocks one by one; a switch chooses the block's static shape. Absent rows cost
nothing. A row that occurs twice is computed once (except in `embed_and_pull_back`). Devices that
hold the parameters together (`group`) share their rows and run through the same blocks.

The gradient is pulled back block by block from cotangents of the embeddings (Gao et al., 2021,
"Scaling Deep Contrastive Learning Batch Size", GradCache), so only one block needs memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from qrag_jax.models.compute.dropout import (
    TokenDropout,
    row_digests,
    token_digests,
    trunk_keys,
    without_key,
)
from qrag_jax.models.compute.group import (
    Group,
    add_to_rows,
    collected,
    dealt,
    given_here,
    longest_dealt,
    look_up,
    of_group,
)
from qrag_jax.models.compute.lora import Adapted, Leaves, has_keys, trainable
from qrag_jax.models.compute.packing import (
    Blocks,
    Filling,
    Layout,
    Shape,
    next_block,
    packed_layout,
    rows_of_block,
)
from qrag_jax.models.compute.row_sums import add_rows
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.trunks.trunk import WORDS, Params


class BlockShapes(NamedTuple):
    """The blocks of each use: embedding all chunks, embedding states, and computing gradients."""

    chunks: Blocks
    states: Blocks
    gradients: Blocks


class TokenCount(NamedTuple):
    """Tokens that carry text, and tokens computed: float32 scalars, as counts can exceed int32.

    A repeated row counts as often as it is computed: once, or each time in `embed_and_pull_back`.
    """

    real: jax.Array
    computed: jax.Array

    @classmethod
    def total(cls, counts: Iterable[TokenCount]) -> TokenCount:
        """The sum of the counts, also over any axes that they have."""
        real, computed = zip(*counts, strict=True)
        return cls(*(jnp.stack(list(map(jnp.sum, field))).sum() for field in (real, computed)))


class TokenRows(NamedTuple):
    """Rows for an encoder: tokens `[N, L]` and their lengths `[N]`, 0 for an absent row."""

    tokens: jax.Array
    lengths: jax.Array


class _Rows(NamedTuple):
    """Rows sorted by length. Absent rows and removed repeated rows have length 0 and come first.

    N rows are those of the group, M of them are dealt to this device.
    """

    group: Group
    order: jax.Array  # [N] the row at each place of the order
    first: jax.Array  # [N] the first row with the same content, possibly the row itself
    tokens: jax.Array  # [M, L] in order
    lengths: jax.Array  # [M] in order
    planned: jax.Array  # [M] lengths that blocks are planned for, the same in the whole group
    dropout: TokenDropout | None  # with the digests of the rows, [M] in order

    def in_order(self, given: jax.Array) -> jax.Array:
        """A value of each row given on this device, `[n, …]` → those of its own rows `[M, …]`."""
        return dealt(self.group, of_group(self.group, given)[self.order])

    def as_given(self, computed: jax.Array) -> jax.Array:
        """Results of the own rows `[M, …]` → those of the rows given on this device `[n, …]`.

        A repeated row has the result of the first one of its kind.
        """
        every = collected(self.group, computed)
        number = jnp.arange(len(self.order))
        place = jnp.zeros_like(self.order).at[self.order].set(number, unique_indices=True)
        return every[place[given_here(self.group, self.first)]]


class _Packed(NamedTuple):
    """One block, ready to compute."""

    tokens: jax.Array  # [T]
    layout: Layout
    place: jax.Array  # [R] in the order by length, all different; at least M: no such row


def embed_rows(
    encoder: TextEncoder, blocks: Blocks, params: Params, given: TokenRows
) -> tuple[jax.Array, TokenCount]:
    """N rows → float32 `[N, D]`; absent rows give zeros.

    It equals `encoder.embed(params, tokens, lengths)` on present rows, up to float rounding. If
    `params` have dropout keys, the masks of `dropout` act in the trunk or on the adapters' inputs.

    Raises:
        ValueError: rows are wider than the longest row length of `blocks`.
    """
    module = encoder.module
    rows = _sorted(module.group, blocks, given, _masks(encoder, params))
    params, _ = without_key(params)
    prepared = module.prepare(module.for_use(params), module.precision.products)

    def compute(embedded: jax.Array, block: _Packed) -> jax.Array:
        words = encoder.words(prepared, block.tokens)
        result = encoder.embed_words(prepared, words, block.layout)
        return _put(embedded, block.place, result)

    nothing = jnp.zeros((len(rows.tokens), encoder.width), jnp.float32)
    embedded, count = _over_blocks(blocks, rows, compute, nothing)
    return rows.as_given(embedded), count


def pull_back(
    encoder: TextEncoder,
    blocks: Blocks,
    params: Params | Adapted,
    given: TokenRows,
    cotangents: jax.Array,
) -> tuple[Params, TokenCount]:
    """Gradient of `Σ_n <cotangents[n], embed(tokens[n])>` with respect to `params`, in float32.

    For `Adapted` params it is the gradient with respect to the adapters. If `params` have a dropout
    key, its masks act.

    Args:
        params: of one tower, or a base with the adapters of one tower.
        given: N rows; absent ones contribute nothing.
        cotangents: `[N, D]`.

    Raises:
        ValueError: rows are wider than the longest row length of `blocks`.
    """
    rows = _sorted(encoder.module.group, blocks, given, _masks(encoder, params))
    # A row that occurs twice is pulled back once, with the sum of its cotangents.
    every = of_group(rows.group, cotangents)
    every = add_rows(jnp.zeros_like(every), rows.first, every)[rows.order]
    cotangents = dealt(rows.group, every)

    def cotangent_of(carry: Any, embedded: jax.Array, place: jax.Array) -> tuple[jax.Array, Any]:
        return cotangents.at[place].get(mode="fill", fill_value=0), carry

    gradient, _, count = _pull_back(encoder, blocks, params, rows, cotangent_of, first=())
    return gradient, count


def embed_and_pull_back(
    encoder: TextEncoder,
    blocks: Blocks,
    params: Params | Adapted,
    given: TokenRows,
    cotangents: Callable[[jax.Array, Any], jax.Array],
    *,
    of_rows: Any,
) -> tuple[Params, jax.Array, TokenCount]:
    """As `pull_back`, for cotangents that are computed from the embeddings.

    A row that occurs twice is computed twice.

    Args:
        cotangents: (embeddings `[R, D]`, the values of their rows `[R, …]`, zeros if there is no
            row) → cotangents `[R, D]`.
        of_rows: values of each row, a pytree of `[N, …]`.

    Returns:
        The gradient, the embeddings `[N, D]` and the token count.
    """
    masks = _masks(encoder, params)
    rows = _sorted(encoder.module.group, blocks, given, masks, repeats=True)
    own = jax.tree.map(rows.in_order, of_rows)

    def of_block(carry: Any, embedded: jax.Array, place: jax.Array) -> tuple[jax.Array, Any]:
        values = jax.tree.map(lambda leaf: leaf.at[place].get(mode="fill", fill_value=0), own)
        carry = _put(carry, place, embedded)
        return cotangents(embedded, values), carry

    nothing = jnp.zeros((len(rows.tokens), encoder.width), jnp.float32)
    gradient, embedded, count = _pull_back(encoder, blocks, params, rows, of_block, first=nothing)
    return gradient, rows.as_given(embedded), count


_Masks = Callable[[jax.Array], TokenDropout]  # from the rows' digests


def _masks(encoder: TextEncoder, params: Params | Adapted) -> _Masks | None:
    """Dropout of the trunk if the tower has a key, of adapters if they have keys, else None."""
    if isinstance(params, Adapted):
        key, of_adapters = None, params.dropout_key is not None
    else:
        key, of_adapters = without_key(params)[1], has_keys(params)
    if key is not None:
        keys = trunk_keys(key, encoder.module.config.num_hidden_layers)
        hidden, attention = encoder.dropout, encoder.attention_dropout
        return partial(TokenDropout, keys=keys, hidden=hidden, attention=attention)
    return partial(TokenDropout, rate=encoder.lora_dropout) if of_adapters else None


def _pull_back(
    encoder: TextEncoder,
    blocks: Blocks,
    params: Params | Adapted,
    rows: _Rows,
    cotangents: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    *,
    first: Any,
) -> tuple[Params, Any, TokenCount]:
    """The gradient, the last carry and the token count.

    Args:
        cotangents: (carry, a block's embeddings `[R, D]`, their places in the order by length
            `[R]`) → (cotangents `[R, D]`, the next carry).
        first: the first carry.
    """
    if not isinstance(params, Adapted):
        params = without_key(params)[0]
    trained, frozen, to_stored = trainable(encoder.module, params, encoder.lora_scale)
    tables = {path: trained.pop(path) for path in ((WORDS,),) if path in trained}
    table = (frozen | tables)[WORDS,]

    def compute(total: tuple[Leaves, Leaves, Any], block: _Packed) -> tuple[Leaves, Leaves, Any]:
        of_layers, of_tables, carry = total
        words = look_up(table, block.tokens, encoder.width)

        def embed(trained: Leaves, looked_up: jax.Array | None) -> jax.Array:
            used = words if looked_up is None else looked_up
            return encoder.embed_words(unflatten_dict(frozen | trained), used, block.layout)

        embedded, back = jax.vjp(embed, trained, words if tables else None)
        cotangent, carry = cotangents(carry, embedded, block.place)
        gradient, of_words = back(cotangent)
        if of_words is not None:
            # A block uses few rows of the word table. Their gradients are added in place: a block
            # needs no whole table.
            of_tables = {(WORDS,): add_to_rows(of_tables[WORDS,], block.tokens, of_words)}
        return jax.tree.map(jnp.add, of_layers, gradient), of_tables, carry

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (trained, tables))
    (gradient, of_tables, carry), count = _over_blocks(blocks, rows, compute, (*zeros, first))
    return to_stored(gradient | of_tables), carry, count


def _sorted(
    group: Group,
    blocks: Blocks,
    given: TokenRows,
    masks: _Masks | None = None,
    repeats: bool = False,
) -> _Rows:
    """Sorts the rows of a group by length, sets the length of repeated rows to 0, and deals them.

    Args:
        masks: makes the dropout of the rows; None: nothing is dropped.
        repeats: keep repeated rows as they are.
    """
    tokens, lengths = (of_group(group, leaf) for leaf in given)
    if tokens.shape[1] > blocks.lengths[-1]:
        raise ValueError(f"rows of {tokens.shape[1]} tokens exceed the lengths {blocks.lengths}")
    tokens = jnp.where(jnp.arange(tokens.shape[1])[None] < lengths[:, None], tokens, 0)
    first = jnp.arange(len(tokens)) if repeats else first_of_its_kind(tokens, lengths)
    lengths = jnp.where(first == jnp.arange(len(first)), lengths, 0)
    order = jnp.argsort(lengths, stable=True)
    planned = longest_dealt(group, lengths[order])
    tokens, lengths = dealt(group, tokens[order]), dealt(group, lengths[order])
    dropout = None if masks is None else masks(row_digests(tokens, lengths))
    return _Rows(group, order, first, tokens, lengths, planned, dropout)


def first_of_its_kind(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """For each row, the first row with the same tokens, `[N]`; tokens must be 0 beyond the length.

    A sort brings rows of equal hash together; a comparison of their tokens then decides.
    """
    number = jnp.arange(tokens.shape[0])
    odd = 2 * np.random.default_rng(0).integers(2**31, size=tokens.shape[1], dtype=np.uint32) + 1
    hashes = (tokens.astype(jnp.uint32) * odd[None]).sum(axis=1, dtype=jnp.uint32)
    order = jnp.argsort(hashes, stable=True)
    new = jnp.append(True, hashes[order][1:] != hashes[order][:-1])
    first_place = jax.lax.cummax(jnp.where(new, number, 0))
    first = jnp.zeros_like(number).at[order].set(order[first_place], unique_indices=True)
    same = (tokens == tokens[first]).all(axis=1) & (lengths == lengths[first])
    return jnp.where(same, first, number)


def _over_blocks(
    blocks: Blocks, rows: _Rows, compute: Callable[[Any, _Packed], Any], start: Any
) -> tuple[Any, TokenCount]:
    """Runs `compute(carry, block)` over blocks that hold every present row once."""
    shapes = list(blocks.shapes(rows.lengths.shape[0]))

    def at_shape(shape: Shape):
        def branch(carry: Any, place: jax.Array, present: jax.Array) -> Any:
            return compute(carry, _pack(rows, place[: shape.rows], present[: shape.rows], shape))

        return branch

    branches = [at_shape(shape) for shape in shapes]

    def rows_left(loop: tuple[Any, Filling, jax.Array]) -> jax.Array:
        return loop[1].low < loop[1].high

    def one_block(loop: tuple[Any, Filling, jax.Array]) -> tuple[Any, Filling, jax.Array]:
        carry, left, computed = loop
        block = next_block(blocks, rows.planned, left)
        place, present = rows_of_block(block, left, max(shape.rows for shape in shapes))
        carry = jax.lax.switch(block.shape, branches, carry, place, present)
        cost = jnp.array([shape.tokens for shape in shapes], jnp.float32)[block.shape]
        low, high = left.low + block.bottom, left.high - block.top
        # Under jax_enable_x64 sums of whole numbers have 64 bits.
        return carry, Filling(low.astype(jnp.int32), high.astype(jnp.int32)), computed + cost

    count = jnp.int32(rows.lengths.shape[0])
    absent = (rows.planned == 0).sum(dtype=jnp.int32)
    carry, _, computed = jax.lax.while_loop(
        rows_left, one_block, (start, Filling(absent, count), jnp.float32(0))
    )
    # Devices along `tensor` share the work on the same rows.
    real = rows.lengths.astype(jnp.float32).sum()
    return carry, TokenCount(real / rows.group.tensor, computed / rows.group.tensor)


def _put(rows: jax.Array, place: jax.Array, values: jax.Array) -> jax.Array:
    """Writes rows `[R, D]` to their places, all different; those beyond the end are left out."""
    # A deterministic GPU sorts all numbers that it writes unless it knows that the places differ.
    return rows.at[place].set(values, mode="drop", unique_indices=True)


def _pack(rows: _Rows, place: jax.Array, present: jax.Array, shape: Shape) -> _Packed:
    lengths = jnp.where(present, rows.lengths[place], 0)
    layout = packed_layout(lengths, shape.tokens, shape.length)
    row = place[jnp.minimum(layout.row, shape.rows - 1)]
    if rows.dropout is not None:
        digests = token_digests(rows.dropout.digests[row], layout.position)
        layout = layout._replace(dropout=dataclasses.replace(rows.dropout, digests=digests))
    tokens = rows.tokens[row, jnp.minimum(layout.position, rows.tokens.shape[1] - 1)]
    nowhere = rows.lengths.shape[0] + jnp.arange(shape.rows)
    return _Packed(tokens, layout, jnp.where(present, place, nowhere))

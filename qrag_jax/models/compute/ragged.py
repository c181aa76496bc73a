"""Embeds rows of unequal length, and computes gradients, with little padding in ONE program.

The compiled program sorts rows by length on the device and packs them into blocks (`packing`). A
loop computes the blocks one by one; a switch chooses the block's static shape. Absent rows cost
nothing. A row that occurs twice is computed once (but see `pull_back`). All devices run through the
same blocks, each with rows of its own.

The gradient is pulled back block by block from cotangents of the embeddings (Gao et al., 2021,
"Scaling Deep Contrastive Learning Batch Size", GradCache), so only one block needs memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from qrag_jax.models.compute import packing
from qrag_jax.models.compute.dropout import TokenDropout, row_digests, token_digests, trunk_keys
from qrag_jax.models.compute.lora import Adapted, Leaves, trainable
from qrag_jax.models.compute.packing import Blocks, Layout, Shape
from qrag_jax.models.embedding import TextEncoder
from qrag_jax.models.trunks.transformer import WORDS, Params
from qrag_jax.runtime import mesh as meshes
from qrag_jax.runtime.mesh import DATA, FSDP, everywhere, on_each, row_devices


class BlockShapes(NamedTuple):
    """The blocks of each use: embedding all chunks, embedding states, and computing gradients."""

    chunks: Blocks
    states: Blocks
    gradients: Blocks


class TokenRows(NamedTuple):
    """Rows for an encoder: tokens `[N, L]` and their lengths `[N]`, 0 for an absent row."""

    tokens: jax.Array
    lengths: jax.Array

    @property
    def flat(self) -> TokenRows:
        """Rows on several axes, `[…, L]` and `[…]`, on one."""
        return TokenRows(self.tokens.reshape(-1, self.tokens.shape[-1]), self.lengths.reshape(-1))


# The rows of one device, in the order by length: tokens `[M, L]`, lengths `[M]`, digests `[M]`
_OfDevice = tuple[jax.Array, jax.Array, jax.Array]
_Dropout = Callable[[jax.Array], TokenDropout]  # from the tokens' digests
_Pack = Callable[[_OfDevice], tuple[jax.Array, Layout]]  # a block's tokens `[T]` and layout


class _Rows(NamedTuple):
    """Rows sorted by length. Absent rows and removed repeated rows have length 0 and come first.

    Device i of D takes every D-th row of N, beginning with row i. So the k-th of its M = N / D rows
    is about as long on every device, and blocks planned for the longest of them fit everywhere.
    """

    mesh: Mesh | None
    order: jax.Array  # [N] the row at each place of the order
    first: jax.Array  # [N] the first row with the same content, possibly the row itself
    own: _OfDevice  # [data, fsdp, …], of each device
    planned: jax.Array  # [M] the longest k-th row of any device

    def in_order(self, computed: jax.Array) -> jax.Array:
        """Results `[data, fsdp, M, …]` → those of the rows as they were given, `[N, …]`.

        A repeated row has the result of the first one of its kind.
        """
        every = everywhere(self.mesh, jnp.moveaxis(computed, 2, 0))
        every = every.reshape(len(self.order), *every.shape[3:])
        number = jnp.arange(len(self.order))
        place = jnp.zeros_like(self.order).at[self.order].set(number, unique_indices=True)
        return meshes.by_row(self.mesh, every[place[self.first]])


def embed_rows(
    encoder: TextEncoder,
    blocks: Blocks,
    params: Params,
    token_rows: TokenRows,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """N rows → float32 `[N, D]`, zeros for absent rows, and the tokens `[2]`.

    It equals `encoder.embed_words` of a `padded_layout` on present rows, up to float rounding. The
    masks of a dropout key act in the trunk or on the adapters' inputs.

    The tokens are numbers of those that carry text and of those computed; in float32, because int32
    may not hold them. A repeated row counts as often as it is computed.
    """
    module, dropout = encoder.module, _dropout(encoder, dropout_key)
    rows = _sorted(module.mesh, token_rows)
    prepared = module.prepare(params, module.precision.products)

    def compute(embedded: jax.Array, pack: _Pack, place: jax.Array) -> jax.Array:
        def on_device(embedded: jax.Array, of_device: _OfDevice) -> jax.Array:
            tokens, layout = pack(of_device)
            words = everywhere(rows.mesh, prepared[WORDS][tokens])
            vectors = encoder.embed_words(prepared, words, layout)
            return _put(embedded, vectors, place)

        on_devices = partial(on_each, FSDP, on_device)
        return on_each(DATA, on_devices, embedded, rows.own)

    nothing = jnp.zeros((*rows.own[1].shape, encoder.width), jnp.float32)
    embedded, count = _over_blocks(blocks, rows, dropout, compute, nothing)
    return rows.in_order(embedded), count


def pull_back(
    encoder: TextEncoder,
    blocks: Blocks,
    params: Params | Adapted,
    token_rows: TokenRows,
    cotangents: jax.Array | Callable[[jax.Array, Any], jax.Array],
    *,
    dropout_key: jax.Array | None = None,
    of_rows: Any = None,
) -> tuple[Params, jax.Array, jax.Array]:
    """Gradient of `Σ_n <cotangents[n], embed(tokens[n])>` with respect to `params`, in float32.

    For `Adapted` params it is the gradient with respect to the adapters. Devices along `data` add
    up gradients of their own, which are summed once, at the end.

    Args:
        params: of one tower, or a base with the adapters of one tower.
        token_rows: N rows; absent ones contribute nothing.
        cotangents: `[N, D]`. A row that occurs twice is pulled back once, with their sum. Or, where
            they depend on the embeddings, (embeddings `[R, D]`, the values of their rows `[R, …]`,
            zeros if there is no row) → `[R, D]`. Then a row that occurs twice is computed twice.
        dropout_key: as in `embed_rows`.
        of_rows: for a function, values of each row, a pytree of `[N, …]`.

    Returns:
        The gradient, the embeddings `[N, D]` and the tokens as those of `embed_rows`.
    """
    rows = _sorted(encoder.module.mesh, token_rows, repeats=callable(cotangents))
    if not callable(cotangents):
        of_rows = packing.add_rows(jnp.zeros_like(cotangents), rows.first, cotangents)
    dropout = _dropout(encoder, dropout_key)
    trained, frozen, to_stored = trainable(encoder.module, params, encoder.lora_scale)
    tables = {path: trained.pop(path) for path in ((WORDS,),) if path in trained}
    table = (frozen | tables)[WORDS,]
    of_devices = jax.tree.map(lambda leaf: _dealt(rows.mesh, leaf[rows.order]), of_rows)

    def compute(total: tuple, pack: _Pack, place: jax.Array) -> tuple:
        def on_replica(
            of_layers: Leaves,
            of_tables: Leaves,
            embedded: jax.Array,
            of_device: _OfDevice,
            values: Any,
        ) -> tuple:
            tokens, layout = on_each(FSDP, pack, of_device)
            words = on_each(FSDP, lambda ids: everywhere(rows.mesh, table[ids]), tokens)

            def embed(trained: Leaves, looked_up: jax.Array | None) -> jax.Array:
                used = words if looked_up is None else looked_up
                embed_words = partial(encoder.embed_words, unflatten_dict(frozen | trained))
                return on_each(FSDP, embed_words, used, layout)

            def of_block(embedded: jax.Array, values: Any) -> jax.Array:
                values = jax.tree.map(
                    lambda leaf: leaf.at[place].get(mode="fill", fill_value=0), values
                )
                return cotangents(embedded, values) if callable(cotangents) else values

            vectors, back = jax.vjp(embed, trained, words if tables else None)
            gradient, of_words = back(on_each(FSDP, of_block, vectors, values))
            if of_words is not None:
                # A block uses few rows of the word table. Their gradients are added in place: a
                # block needs no whole table.
                of_words = of_words.reshape(-1, of_words.shape[-1])
                summed = packing.add_rows(of_tables[WORDS,], tokens.reshape(-1), of_words)
                of_tables = {(WORDS,): summed}
            embedded = on_each(FSDP, partial(_put, place=place), embedded, vectors)
            return jax.tree.map(jnp.add, of_layers, gradient), of_tables, embedded

        return on_each(DATA, on_replica, *total, rows.own, of_devices)

    zeros = meshes.zeros_like(rows.mesh, (trained, tables))
    nothing = jnp.zeros((*rows.own[1].shape, encoder.width), jnp.float32)
    total, count = _over_blocks(blocks, rows, dropout, compute, (*zeros, nothing))
    of_layers, of_tables = jax.tree.map(lambda leaf: leaf.sum(axis=0), total[:2])
    return to_stored(of_layers | of_tables), rows.in_order(total[2]), count


def _dropout(encoder: TextEncoder, key: jax.Array | None) -> _Dropout | None:
    if key is None:
        return None
    keys = trunk_keys(key, encoder.module.config.num_hidden_layers)
    shares: Any = {"hidden": encoder.dropout, "attention": encoder.attention_dropout}
    return partial(TokenDropout, keys=keys, adapters=encoder.lora_dropout, **shares)


def _sorted(mesh: Mesh | None, token_rows: TokenRows, *, repeats: bool = False) -> _Rows:
    """Sorts rows by length, sets the length of repeated rows to 0, and deals them to devices.

    `repeats`: keep repeated rows as they are.
    """
    tokens, lengths = everywhere(mesh, tuple(token_rows))
    tokens = jnp.where(jnp.arange(tokens.shape[1])[None] < lengths[:, None], tokens, 0)
    first = jnp.arange(len(tokens)) if repeats else first_of_its_kind(tokens, lengths)
    lengths = jnp.where(first == jnp.arange(len(first)), lengths, 0)
    order = jnp.argsort(lengths, stable=True)
    tokens, lengths = tokens[order], lengths[order]
    devices = math.prod(row_devices(mesh))
    planned = lengths[devices - 1 :: devices]
    of_devices = tokens, lengths, row_digests(tokens, lengths)
    return _Rows(mesh, order, first, jax.tree.map(partial(_dealt, mesh), of_devices), planned)


def _dealt(mesh: Mesh | None, ordered: jax.Array) -> jax.Array:
    """Values of rows in the order by length, `[N, …]` → `[data, fsdp, M, …]`."""
    hands = ordered.reshape(-1, *row_devices(mesh), *ordered.shape[1:])
    return meshes.by_device(mesh, jnp.moveaxis(hands, 0, 2))


def first_of_its_kind(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """For each row, the first row with the same tokens, `[N]`; tokens must be 0 beyond the length.

    A sort brings rows of equal hash together; a comparison of their tokens then decides.
    """
    number = jnp.arange(tokens.shape[0])
    hashes = row_digests(tokens, lengths)
    order = jnp.argsort(hashes, stable=True)
    new = jnp.append(True, hashes[order][1:] != hashes[order][:-1])
    first_place = jax.lax.cummax(jnp.where(new, number, 0))
    first = jnp.zeros_like(number).at[order].set(order[first_place], unique_indices=True)
    same = (tokens == tokens[first]).all(axis=1) & (lengths == lengths[first])
    return jnp.where(same, first, number)


def _over_blocks(
    blocks: Blocks,
    rows: _Rows,
    dropout: _Dropout | None,
    compute: Callable[[Any, _Pack, jax.Array], Any],
    start: Any,
) -> tuple[Any, jax.Array]:
    """Runs `compute(carry, pack, place)` over blocks that hold every present row once.

    `pack` makes the block of one device from its rows; place `[R]` says where these are among the M
    of each device; M or more: nowhere.
    """
    count = len(rows.planned)
    shapes = list(blocks.shapes(count))
    cost = jnp.array([shape.tokens for shape in shapes], jnp.float32)

    def at_shape(shape: Shape) -> Callable[..., Any]:
        def branch(carry: Any, place: jax.Array, present: jax.Array) -> Any:
            place, present = place[: shape.rows], present[: shape.rows]
            pack = partial(_pack, dropout, shape, place, present)
            nowhere = count + jnp.arange(shape.rows)
            return compute(carry, pack, jnp.where(present, place, nowhere))

        return branch

    branches = [at_shape(shape) for shape in shapes]

    def one_block(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        carry, low, high, computed = loop
        shape, place, present, low, high = packing.next_block(shapes, rows.planned, low, high)
        carry = jax.lax.switch(shape, branches, carry, place, present)
        return carry, low, high, computed + cost[shape]

    absent = (rows.planned == 0).sum(dtype=jnp.int32)
    carry, _, _, computed = jax.lax.while_loop(
        lambda loop: loop[1] < loop[2], one_block, (start, absent, jnp.int32(count), jnp.float32(0))
    )
    real = rows.own[1].astype(jnp.float32).sum()
    return carry, jnp.stack([real, computed * math.prod(rows.own[1].shape[:2])])


def _put(rows: jax.Array, values: jax.Array, place: jax.Array) -> jax.Array:
    """Writes rows `[R, D]` to their places, all different; those beyond the end are left out."""
    # A deterministic GPU sorts all numbers that it writes unless it knows that the places differ.
    return rows.at[place].set(values, mode="drop", unique_indices=True)


def _pack(
    dropout: _Dropout | None, shape: Shape, place: jax.Array, present: jax.Array, rows: _OfDevice
) -> tuple[jax.Array, Layout]:
    tokens, of_rows, digests = rows
    lengths = jnp.where(present, of_rows[place], 0)
    layout = packing.packed_layout(lengths, shape.tokens, shape.length)
    row = place[jnp.minimum(layout.row, shape.rows - 1)]
    if dropout is not None:
        of_tokens = token_digests(digests[row], layout.position)
        layout = layout._replace(dropout=dropout(of_tokens))
    return tokens[row, jnp.minimum(layout.position, tokens.shape[1] - 1)], layout

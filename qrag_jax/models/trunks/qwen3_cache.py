"""Keys and values of tokens that were computed already: what sampling goes on from.

One function, `extend`, reads a prompt part by part, and on CPU each sampled token: rows get new
tokens at their own ends, which attend to all that is cached. Shapes are static; a row's places
beyond its length are not read. The cache lies in blocks of places, and attention runs over those
blocks that some row has reached: so one program serves short and long rows, and room costs no time.

An accelerator pays for the loops over layers and blocks with each token: it copies the weights of a
layer and each block of the cache before it multiplies by them, and it asks the host whether a loop
goes on. So there `append` goes on from what the prompts left, a token of each row in few kernels.
Nothing is sliced: each layer has arrays of its own. The cache of a layer lies in blocks, each as
large as all before it, and the caller says how many of them the rows have reached. Each number is
compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.attention import angles_at
from qrag_jax.models.compute.lora import ADAPTER
from qrag_jax.models.compute.precision import rounded_einsum
from qrag_jax.models.trunks.transformer import LAYERS, Layer, Params, Transformer

_LOWEST = -1e30
# How numbers are put at places of which no two are equal; those outside are left out. If XLA does
# not know that they differ, a deterministic program sorts all numbers first.
APART: Any = {"mode": "drop", "unique_indices": True}
# Places of a block. A round of the loop over blocks costs a GPU its 13 kernels and an answer of the
# host, in each layer and for each part of a prompt: some 60 µs, in which it reads 300 MB.
_BLOCK, _CPU_BLOCK = 512, 128
_WHOLE = 128  # places: products are fast where their sizes are multiples of it
_MOST_BLOCKS = 4  # of a layer, where each token is appended
_Arrays = tuple[jax.Array, ...]
_Carry = tuple[jax.Array, jax.Array, jax.Array]  # hidden states, keys and values


class Cache(NamedTuple):
    """What is known of B rows, with room for n·C tokens each: L layers, n blocks of C places."""

    # `[L, n, B, groups, head_dim, C]`: products by group need no other order of the numbers
    keys: jax.Array
    values: jax.Array  # `[L, n, B, groups, C, head_dim]`
    lengths: jax.Array  # int32 `[B]`, tokens of each row

    @property
    def room(self) -> int:
        """n·C."""
        return self.keys.shape[1] * self.keys.shape[-1]

    def rows(self, which: jax.Array) -> Cache:
        """The rows of these numbers `[m]`; a row may come several times."""
        return Cache(self.keys[:, :, which], self.values[:, :, which], self.lengths[which])


def empty_cache(trunk: Transformer, rows: int, room: int) -> Cache:
    """A cache of rows without tokens, with room for so many or a few more."""
    c, places = trunk.config, _places(room, _BLOCK if trunk.scanned else _CPU_BLOCK)
    before = c.num_hidden_layers, math.ceil(room / places), rows, c.key_heads
    dtype = trunk.precision.activations
    return Cache(
        keys=jnp.zeros((*before, c.head_dim, places), dtype),
        values=jnp.zeros((*before, places, c.head_dim), dtype),
        lengths=jnp.zeros(rows, jnp.int32),
    )


def _places(room: int, most: int) -> int:
    """Places of a block, so that few of the last block's stand behind the room."""
    even = room / math.ceil(room / most)
    return min(_WHOLE * math.ceil(even / _WHOLE), room)


def extend(
    trunk: Transformer, prepared: Params, words: jax.Array, counts: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Appends tokens to rows: their hidden states, and the longer cache.

    Args:
        prepared: parameters as `trunk.prepare` returns them.
        words: `[B, N, H]`, rows of the word table.
        counts: int32 `[B]`, 0 to N: a row's new tokens. There must be room for them.

    Returns:
        Hidden states `[B, N, H]`, normed, finite but meaningless beyond a row's count; the cache.
    """
    c = trunk.config
    rows, number, width = words.shape
    position = cache.lengths[:, None] + jnp.arange(number)[None]  # [B, N]
    inside = jnp.minimum(position, cache.room - 1).reshape(-1)
    cos, sin = angles_at(inside, c.rotations[0], cache.room)
    is_new = jnp.arange(number)[None] < counts[:, None]
    # Places beyond the room are left out of the update.
    place = jnp.where(is_new, position, cache.room + jnp.arange(number)[None])
    reached = (cache.lengths + counts).max()
    layer, places = trunk.layer(), cache.keys.shape[-1]

    def one(carry: _Carry, params: Params, which: Any) -> _Carry:
        """The layer of this number. The cache goes from layer to layer: it is changed in place."""
        x, keys, values = carry
        variables = {"params": params}
        projected: Any = layer.apply(variables, x, cos, sin, method=Layer.projected)
        query, key, value = (part.reshape(rows, number, -1, c.head_dim) for part in projected)
        block, row, at = place // places, jnp.arange(rows)[:, None], place % places
        keys = keys.at[which, block, row, :, :, at].set(key.astype(keys.dtype), **APART)
        values = values.at[which, block, row, :, at].set(value.astype(values.dtype), **APART)

        def block_at(n: jax.Array) -> tuple[jax.Array, jax.Array]:
            def taken(leaf: jax.Array) -> jax.Array:
                start, size = (which, n, 0, 0, 0, 0), (1, 1, *leaf.shape[2:])
                return jax.lax.dynamic_slice(leaf, start, size)[0, 0]

            return taken(keys), taken(values)

        attended = _attended(trunk, query, block_at, position, reached)
        attended = attended.reshape(rows * number, -1).astype(x.dtype)
        after = layer.apply(variables, x, attended, method=Layer.after_attention)
        return jnp.asarray(after), keys, values

    x = words.astype(trunk.precision.activations).reshape(-1, width)
    carry, layers = (x, cache.keys, cache.values), range(c.num_hidden_layers)
    if trunk.scanned:
        numbered = prepared[LAYERS], jnp.array(layers)
        carry, _ = jax.lax.scan(lambda carry, pair: (one(carry, *pair), None), carry, numbered)
    else:
        for n in layers:
            carry = one(carry, prepared[f"{LAYERS}_{n}"], n)
    hidden = trunk.apply({"params": prepared}, carry[0], method=Transformer.normed)
    longer = Cache(*carry[1:], cache.lengths + counts)
    return jnp.asarray(hidden).reshape(rows, number, width), longer


def _attended(
    trunk: Transformer,
    query: jax.Array,
    block_at: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    position: jax.Array,
    reached: jax.Array,
) -> jax.Array:
    """Attention block by block, with a running maximum and sum (arXiv 1805.02867).

    Args:
        query: `[B, N, heads, d]`.
        block_at: number of a block → its keys `[B, groups, d, C]` and values `[B, groups, C, d]`.
        position: `[B, N]`, of the queries, each of which sees the places up to its own.
        reached: places that some row has; later blocks are not read.
    """
    rows, number, heads, width = query.shape
    products = trunk.precision.products
    groups, _, places = jax.eval_shape(block_at, jnp.int32(0))[0].shape[1:]
    share = heads // groups
    query = query.reshape(rows, number, groups, share, width).transpose(0, 2, 1, 3, 4)
    query = query.reshape(rows, groups, number * share, width)
    seen = jnp.repeat(position, share, axis=1)[:, None, :, None]

    def block(n: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, weighted = sums
        keys, values = block_at(n)
        scores = rounded_einsum(products, "bgqd,bgds->bgqs", query, keys)
        visible = (n * places + jnp.arange(places))[None, None, None] <= seen
        scores = jnp.where(visible, scores / width**0.5, _LOWEST)
        highest = jnp.maximum(most, scores.max(axis=-1))
        scale, powers = jnp.exp(most - highest), jnp.exp(scores - highest[..., None])
        product = rounded_einsum(products, "bgqs,bgsd->bgqd", powers, values)
        total = total * scale + powers.sum(axis=-1)
        return highest, total, weighted * scale[..., None] + product

    # Every query sees the first place, so the maximum is real from the first block on.
    nothing = jnp.zeros(query.shape[:-1], jnp.float32)
    start = nothing + _LOWEST, nothing, jnp.zeros(query.shape, jnp.float32)
    _, total, weighted = jax.lax.fori_loop(0, (reached + places - 1) // places, block, start)
    attended = weighted / jnp.maximum(total, 1e-30)[..., None]
    attended = attended.reshape(rows, groups, number, share, width)
    return attended.transpose(0, 2, 1, 3, 4).reshape(rows, number, heads, width)


# ---------------------------------------------------------------------- token by token


class DecodeCache(NamedTuple):
    """What is known of B rows: for each layer, blocks of which block k has C_k places."""

    keys: tuple[_Arrays, ...]  # for each layer, for each block `[B, groups, head_dim, C_k]`
    values: tuple[_Arrays, ...]  # for each layer, for each block `[B, groups, C_k, head_dim]`
    lengths: jax.Array  # int32 `[B]`, tokens of each row

    @property
    def ends(self) -> tuple[int, ...]:
        """The place behind the last one of each block."""
        return (*itertools.accumulate(block.shape[-1] for block in self.keys[0]),)

    def rows(self, which: jax.Array) -> DecodeCache:
        """The rows of these numbers `[m]`; a row may come several times."""
        return jax.tree.map(lambda leaf: leaf[which], self)


def decode_cache(cache: Cache, source: jax.Array) -> DecodeCache:
    """The rows `source` `[B]` of a cache with stacked layers.

    Its blocks end at an eighth, a quarter, a half and all of the room, as far as these differ.
    """
    layers, count = cache.keys.shape[:2]
    ends = sorted({math.ceil(count / 2**halved) for halved in range(_MOST_BLOCKS)})
    parts = [*itertools.pairwise([0, *ends])]

    def taken(stacked: jax.Array, axis: int) -> tuple[_Arrays, ...]:
        """`[L, n, U, groups, …]` → blocks, in whose `[B, groups, …]` this axis has the places."""

        def joined(part: jax.Array) -> jax.Array:
            before = jnp.moveaxis(part[:, source], 0, axis)
            sizes = before.shape
            return before.reshape(*sizes[:axis], -1, *sizes[axis + 2 :])

        return tuple(
            tuple(joined(stacked[n, start:end]) for start, end in parts) for n in range(layers)
        )

    return DecodeCache(taken(cache.keys, 3), taken(cache.values, 2), cache.lengths[source])


def layers_of(trunk: Transformer, prepared: Params) -> tuple[Params, ...]:
    """The parameters of each layer. What is multiplied has the dtype of the products already."""

    def taken(path: Any, leaf: jax.Array, number: int) -> jax.Array:
        is_factor = path[-1].key in ("kernel", *ADAPTER)
        return leaf[number].astype(trunk.precision.products) if is_factor else leaf[number]

    return tuple(
        jax.tree_util.tree_map_with_path(partial(taken, number=number), prepared[LAYERS])
        for number in range(trunk.config.num_hidden_layers)
    )


def append(
    decoder: tuple[Transformer, Params, Sequence[Params], int],
    words: jax.Array,
    is_new: jax.Array,
    cache: DecodeCache,
) -> tuple[jax.Array, DecodeCache]:
    """Appends a token to rows: their hidden states, and the longer cache.

    Args:
        decoder: a trunk with scanned layers, its parameters as `trunk.prepare` returns them and as
            `layers_of` does, and the blocks of the cache that are read; no row has a place behind.
        words: `[B, H]`, rows of the word table.
        is_new: bool `[B]`, whether a row gets a token.

    Returns:
        Hidden states `[B, H]`, normed, finite but meaningless in rows without a token; the cache.
    """
    trunk, prepared, layers, number = decoder
    ends = cache.ends[:number]
    position = jnp.minimum(cache.lengths, ends[-1] - 1)
    cos, sin = angles_at(position, trunk.config.rotations[0], ends[-1])
    layer, row = trunk.layer(), jnp.arange(len(words))
    places = []
    for start, end in itertools.pairwise([0, *ends]):
        is_here = is_new & (start <= position) & (position < end)
        # A place beyond the block is left out of the update.
        places.append(jnp.where(is_here, position - start, end - start))

    def one(x: jax.Array, params: Params, keys: _Arrays, values: _Arrays) -> Any:
        variables = {"params": params}
        projected: Any = layer.apply(variables, x, cos, sin, method=Layer.projected)
        query, key, value = projected
        keys = tuple(
            block.at[row, :, :, place].set(key.astype(block.dtype), **APART)
            for block, place in zip(keys, places, strict=True)
        )
        values = tuple(
            block.at[row, :, place].set(value.astype(block.dtype), **APART)
            for block, place in zip(values, places, strict=True)
        )
        attended = _attended_to_all(trunk, query, keys, values, position)
        attended = attended.reshape(len(x), -1).astype(x.dtype)
        after = layer.apply(variables, x, attended, method=Layer.after_attention)
        return jnp.asarray(after), keys, values

    x = words.astype(trunk.precision.activations)
    longer = []
    for params, keys, values in zip(layers, cache.keys, cache.values, strict=True):
        x, longer_keys, longer_values = one(x, params, keys[:number], values[:number])
        longer.append((longer_keys + keys[number:], longer_values + values[number:]))
    all_keys, all_values = zip(*longer, strict=True)
    hidden = trunk.apply({"params": prepared}, x, method=Transformer.normed)
    lengths = cache.lengths + is_new.astype(jnp.int32)
    return jnp.asarray(hidden), DecodeCache(all_keys, all_values, lengths)


def _attended_to_all(
    trunk: Transformer, query: jax.Array, keys: _Arrays, values: _Arrays, position: jax.Array
) -> jax.Array:
    """Attention of queries `[B, heads, d]` to the places up to their own: `[B, heads, d]`."""
    rows, heads, width = query.shape
    products, groups = trunk.precision.products, keys[0].shape[1]
    query = query.reshape(rows, groups, heads // groups, width)
    parts = [rounded_einsum(products, "bgqd,bgds->bgqs", query, block) for block in keys]
    ends = [*itertools.accumulate(part.shape[-1] for part in parts)]
    scores = jnp.concatenate(parts, axis=-1) / width**0.5
    visible = jnp.arange(ends[-1])[None, None, None] <= position[:, None, None, None]
    scores = jnp.where(visible, scores, _LOWEST)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weighted = jnp.zeros(query.shape, jnp.float32)
    for part, block in zip(jnp.split(powers, ends[:-1], axis=-1), values, strict=True):
        weighted += rounded_einsum(products, "bgqs,bgsd->bgqd", part, block)
    return (weighted / powers.sum(axis=-1, keepdims=True)).reshape(rows, heads, width)

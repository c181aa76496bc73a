"""A token of each row behind what `qwen3_cache` has read, in few kernels: for accelerators.

`qwen3_cache.extend` appends any number of tokens, by a loop over layers and one over blocks of the
cache. An accelerator pays for these with each token: it copies the weights of a layer and each
block of the cache before it multiplies by them, and it asks the host whether a loop goes on. Here
nothing is sliced: each layer has arrays of its own. The cache of a layer lies in blocks, each as
large as all before it, and the caller says how many of them the rows have reached. Each number is
compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.linear import ADAPTER
from qrag_jax.models.compute.precision import rounded_einsum
from qrag_jax.models.compute.rope import angles_at
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Layer
from qrag_jax.models.trunks.qwen3_cache import APART, Cache
from qrag_jax.models.trunks.trunk import LAYERS, Params

_LOWEST = -1e30
_MOST_BLOCKS = 4  # of a layer
_Arrays = tuple[jax.Array, ...]


class DecodeCache(NamedTuple):
    """What is known of B rows: for each layer, blocks of which block k has C_k places.

    Attributes:
        keys: for each layer, for each block `[B, groups, head_dim, C_k]`.
        values: for each layer, for each block `[B, groups, C_k, head_dim]`.
        lengths: int32 `[B]`, tokens of each row.
    """

    keys: tuple[tuple[jax.Array, ...], ...]
    values: tuple[tuple[jax.Array, ...], ...]
    lengths: jax.Array

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

    def taken(stacked: jax.Array, axis: int) -> tuple[tuple[jax.Array, ...], ...]:
        """`[L, n, U, groups, …]` → blocks, in whose `[B, groups, …]` this axis has the places."""

        def joined(part: jax.Array) -> jax.Array:
            before = jnp.moveaxis(part[:, source], 0, axis)
            sizes = before.shape
            return before.reshape(*sizes[:axis], -1, *sizes[axis + 2 :])

        return tuple(
            tuple(joined(stacked[n, start:end]) for start, end in parts) for n in range(layers)
        )

    return DecodeCache(taken(cache.keys, 3), taken(cache.values, 2), cache.lengths[source])


class Decoder(NamedTuple):
    """What `append` computes by.

    Attributes:
        trunk: its layers are scanned.
        prepared: parameters as `trunk.prepare` returns them.
        layers: those of each layer, see `layers_of`.
        blocks: how many of the cache are read; no row has a place behind them.
    """

    trunk: Qwen3
    prepared: Params
    layers: Sequence[Params]
    blocks: int


def layers_of(trunk: Qwen3, prepared: Params) -> tuple[Params, ...]:
    """The parameters of each layer. What is multiplied has the dtype of the products already."""

    def taken(path: Any, leaf: jax.Array, number: int) -> jax.Array:
        is_factor = path[-1].key in ("kernel", *ADAPTER)
        return leaf[number].astype(trunk.precision.products) if is_factor else leaf[number]

    return tuple(
        jax.tree_util.tree_map_with_path(partial(taken, number=number), prepared[LAYERS])
        for number in range(trunk.config.num_hidden_layers)
    )


def append(
    decoder: Decoder, words: jax.Array, is_new: jax.Array, cache: DecodeCache
) -> tuple[jax.Array, DecodeCache]:
    """Appends a token to rows: their hidden states, and the longer cache.

    Args:
        words: `[B, H]`, rows of the word table.
        is_new: bool `[B]`, whether a row gets a token. The blocks that are read have room for it.

    Returns:
        Hidden states `[B, H]`, normed, finite but meaningless in rows without a token; the cache.
    """
    trunk, number = decoder.trunk, decoder.blocks
    ends = cache.ends[:number]
    position = jnp.minimum(cache.lengths, ends[-1] - 1)
    cos, sin = angles_at(position, trunk.config.frequency, ends[-1])
    layer, row = trunk.layer(), jnp.arange(len(words))
    places = []
    for start, end in itertools.pairwise([0, *ends]):
        is_here = is_new & (start <= position) & (position < end)
        # A place beyond the block is left out of the update.
        places.append(jnp.where(is_here, position - start, end - start))

    def one(x: jax.Array, params: Params, keys: _Arrays, values: _Arrays) -> Any:
        variables = {"params": params}
        projected: Any = layer.apply(variables, x, cos, sin, method=Qwen3Layer.projected)
        query, key, value = projected
        keys = tuple(
            block.at[row, :, :, place].set(key.astype(block.dtype), **APART)
            for block, place in zip(keys, places, strict=True)
        )
        values = tuple(
            block.at[row, :, place].set(value.astype(block.dtype), **APART)
            for block, place in zip(values, places, strict=True)
        )
        attended = _attended(trunk, query, keys, values, position)
        attended = attended.reshape(len(x), -1).astype(x.dtype)
        after = layer.apply(variables, x, attended, method=Qwen3Layer.after_attention)
        return jnp.asarray(after), keys, values

    x = words.astype(trunk.precision.activations)
    layers = []
    for params, keys, values in zip(decoder.layers, cache.keys, cache.values, strict=True):
        x, longer_keys, longer_values = one(x, params, keys[:number], values[:number])
        layers.append((longer_keys + keys[number:], longer_values + values[number:]))
    all_keys, all_values = zip(*layers, strict=True)
    hidden = trunk.apply({"params": decoder.prepared}, x, method=Qwen3.normed)
    lengths = cache.lengths + is_new.astype(jnp.int32)
    return jnp.asarray(hidden), DecodeCache(all_keys, all_values, lengths)


def _attended(
    trunk: Qwen3, query: jax.Array, keys: _Arrays, values: _Arrays, position: jax.Array
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

"""Keys and values of tokens that were computed already: what sampling goes on from.

One function, `extend`, reads a prompt part by part and each sampled token: rows get new tokens at
their own ends, which attend to all that is cached. Shapes are static; a row's places beyond its
length are not read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.precision import exact
from qrag_jax.models.compute.rope import angles_at
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Layer
from qrag_jax.models.trunks.trunk import LAYERS, Params

_LOWEST = -1e30


class Cache(NamedTuple):
    """What is known of B rows, with room for S tokens each.

    Attributes:
        keys, values: `[B, groups, S, head_dim]`, one array a layer, or stacked on a leading axis
            if the layers are scanned. Products by group then need no other order of the numbers.
        lengths: int32 `[B]`, tokens of each row.
    """

    keys: Any
    values: Any
    lengths: jax.Array

    @property
    def room(self) -> int:
        """S."""
        return jax.tree.leaves(self.keys)[0].shape[-2]

    def rows(self, which: jax.Array) -> Cache:
        """The rows of these numbers `[n]`; a row may come several times."""
        axis = jax.tree.leaves(self.keys)[0].ndim - 4
        keys, values = (
            jax.tree.map(lambda leaf: jnp.take(leaf, which, axis), each)
            for each in (self.keys, self.values)
        )
        return Cache(keys, values, self.lengths[which])


def empty_cache(trunk: Qwen3, rows: int, room: int) -> Cache:
    """A cache of rows without tokens."""
    c = trunk.config
    shape = rows, c.num_key_value_heads, room, c.head_dim

    def nothing() -> Any:
        if trunk.scanned:
            return jnp.zeros((c.num_hidden_layers, *shape), trunk.precision.activations)
        layers = range(c.num_hidden_layers)
        return tuple(jnp.zeros(shape, trunk.precision.activations) for _ in layers)

    return Cache(nothing(), nothing(), jnp.zeros(rows, jnp.int32))


def extend(
    trunk: Qwen3,
    prepared: Params,
    words: jax.Array,
    counts: jax.Array,
    cache: Cache,
    *,
    window: int = 0,
) -> tuple[jax.Array, Cache]:
    """Appends tokens to rows: their hidden states, and the longer cache.

    Args:
        prepared: parameters as `trunk.prepare` returns them.
        words: `[B, N, H]`, rows of the word table.
        counts: int32 `[B]`, 0 to N: a row's new tokens. There must be room for them.
        window: tokens of the longest row behind this, if that is known; 0: the room.

    Returns:
        Hidden states `[B, N, H]`, normed, finite but meaningless beyond a row's count; the cache.
    """
    c = trunk.config
    rows, number, width = words.shape
    position = cache.lengths[:, None] + jnp.arange(number)[None]  # [B, N]
    cos, sin = angles_at(jnp.minimum(position, cache.room - 1).reshape(-1), c.frequency, cache.room)
    is_new = jnp.arange(number)[None] < counts[:, None]
    # Places beyond the row's end are left out of the update, and beyond the room anyway.
    place = jnp.where(is_new, position, cache.room)
    window = min(window or cache.room, cache.room)
    seen = jnp.arange(window)[None, None] <= position[..., None]  # [B, N, window]
    layer = trunk.layer()

    def put(cached: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(rows, number, *cached.shape[1::2]).astype(cached.dtype)
        return cached.at[jnp.arange(rows)[:, None], :, place].set(new, mode="drop")

    def one(x: jax.Array, params: Params, keys: jax.Array, values: jax.Array) -> Any:
        variables = {"params": params}
        projected: Any = layer.apply(variables, x, cos, sin, method=Qwen3Layer.projected)
        query, key, value = projected
        keys, values = put(keys, key), put(values, value)
        query = query.reshape(rows, number, -1, c.head_dim)
        attended = _attended(trunk, query, keys[:, :, :window], values[:, :, :window], seen)
        attended = attended.reshape(rows * number, -1).astype(x.dtype)
        after = layer.apply(variables, x, attended, method=Qwen3Layer.after_attention)
        return jnp.asarray(after), keys, values

    x = words.astype(trunk.precision.activations).reshape(-1, width)
    if trunk.scanned:

        def scanned(x: jax.Array, layer: tuple[Params, jax.Array, jax.Array]):
            x, keys, values = one(x, *layer)
            return x, (keys, values)

        x, (keys, values) = jax.lax.scan(scanned, x, (prepared[LAYERS], cache.keys, cache.values))
    else:
        pairs = []
        for n, cached in enumerate(zip(cache.keys, cache.values, strict=True)):
            x, *pair = one(x, prepared[f"{LAYERS}_{n}"], *cached)
            pairs.append(pair)
        keys, values = (tuple(each) for each in zip(*pairs, strict=True))
    hidden = trunk.apply({"params": prepared}, x, method=Qwen3.normed)
    return (
        jnp.asarray(hidden).reshape(rows, number, width),
        Cache(keys, values, cache.lengths + counts),
    )


def _attended(
    trunk: Qwen3, query: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array
) -> jax.Array:
    """query `[B, N, heads, d]`, keys and values `[B, groups, S, d]`, seen `[B, N, S]`."""
    rows, number, heads, width = query.shape
    products = trunk.precision.products
    keys, values = keys.astype(products), values.astype(products)
    groups = keys.shape[1]
    query = query.reshape(rows, number, groups, -1, width).transpose(0, 2, 1, 3, 4)
    share = query.shape[3]
    scores = jnp.einsum(
        "bgqd,bgsd->bgqs",
        query.reshape(rows, groups, number * share, width).astype(products),
        keys,
        precision=exact(products),
        preferred_element_type=jnp.float32,
    )
    seen = jnp.repeat(seen, share, axis=1)[:, None]
    scores = jnp.where(seen, scores / width**0.5, _LOWEST)
    weights = jax.nn.softmax(scores).astype(products)
    attended = jnp.einsum(
        "bgqs,bgsd->bgqd",
        weights,
        values,
        precision=exact(products),
        preferred_element_type=jnp.float32,
    ).reshape(rows, groups, number, share, width)
    return attended.transpose(0, 2, 1, 3, 4).reshape(rows, number, heads, width)

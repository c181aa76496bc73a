"""Dropout in trunks and on the inputs of low-rank adapters; masks do not depend on row placement.

A training step plays episodes with the embeddings of one pass and learns from the embeddings of
another pass, which packs the same rows into other blocks. Both passes must use the same masks. So
a mask depends only on the step's key, the tower, the layer, the place in the layer (or the linear
map), the CONTENT of the row, the position and the feature. Equal rows of one step have equal
masks, on any device.

A trunk drops where BERT does (Devlin et al., 2019): embeddings, attention weights, and what
attention and the feed-forward add to the residual. GTE also drops gated hidden values, and
ModernBERT drops these instead of what the feed-forward adds. Where adapters are trained, the frozen
trunk drops nothing, and the adapters' inputs are dropped. A pass that is given no key drops
nothing: there are keys in a training step alone.
"""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLIER = 0x2C9277B5  # ≡ 5 mod 8: its powers repeat only after 2³⁰, more than any row has
BETWEEN_POSITIONS = 0x9E3779B9  # odd, so that all positions of a row differ
BETWEEN_HEADS = 2**16  # larger than any key's position

# Places where a trunk drops, as indices of their keys at one depth. Depth 0 (before all layers) has
# EMBEDDINGS alone; the other depths, one per layer, have the places below.
EMBEDDINGS = 0
ATTENTION_WEIGHTS, ATTENTION_OUTPUT, GATED, OUTPUT = PLACES = range(4)
ADAPTERS = 0  # the place whose key the maps' own keys are made from: with adapters it is free


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenDropout:
    """What dropout needs to know about the tokens of a block."""

    digests: jax.Array  # uint32 `[T]`, a hash of each token's row and position
    keys: jax.Array  # uint32 `[depths, places, 2]`, or `[places, 2]` at one depth
    # p, the shares that are dropped: of hidden states, attention weights and inputs of adapters
    hidden: float = dataclasses.field(default=0.0, metadata={"static": True})
    attention: float = dataclasses.field(default=0.0, metadata={"static": True})
    adapters: float = dataclasses.field(default=0.0, metadata={"static": True})

    def at_depth(self, depth: int | jax.Array) -> TokenDropout:
        """With the keys of one depth: 0 is before all layers, n is layer n - 1."""
        return dataclasses.replace(self, keys=self.keys[depth])


def trunk_keys(key: jax.Array, layers: int) -> jax.Array:
    """A tower's PRNG key → uint32 `[layers + 1, places, 2]`, the keys of all places."""
    return jax.random.key_data(jax.random.split(key, (layers + 1, len(PLACES))))[..., :2]


def row_digests(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """tokens `[N, L]`, lengths `[N]` → uint32 `[N]`: Σ_i (token_i + 1)·m^i modulo 2³².

    Tokens beyond a row's length have no effect, nor has L. Two rows with the same digest would have
    the same masks, which does no harm.
    """
    width = tokens.shape[1]
    powers = np.array([pow(MULTIPLIER, i, 2**32) for i in range(width)], np.uint32)
    inside = jnp.arange(width)[None] < lengths[:, None]
    terms = jnp.where(inside, tokens.astype(jnp.uint32) + 1, 0) * powers[None]
    return terms.sum(axis=1, dtype=jnp.uint32)


def token_digests(rows: jax.Array, position: jax.Array) -> jax.Array:
    """Each token's row digest and position in the row, both `[T]` → its digest, uint32 `[T]`."""
    return rows + position.astype(jnp.uint32) * jnp.uint32(BETWEEN_POSITIONS)


def drop(x: jax.Array, key: jax.Array, digests: jax.Array, rate: float) -> jax.Array:
    """`[T, I]` with each entry set to 0 with probability p, else divided by 1 - p; in x's dtype.

    `key`, uint32 `[2]`, belongs to one place or map in one layer; p is the rate. Feature i of a
    token is dropped if mix(mix(digest ^ key_0) + mix(i + key_1)) / 2³² < p. Threefry, JAX's default
    generator, would nearly double the time of a gradient (`ragged.pull_back`) on CPU.
    """
    of_tokens = mix(digests ^ key[0])
    of_features = mix(jnp.arange(x.shape[1], dtype=jnp.uint32) + key[1])
    kept = _kept(of_tokens[:, None] + of_features[None], rate)
    return jnp.where(kept, x / (1 - rate), 0)


def _kept(mixed: jax.Array, rate: float) -> jax.Array:
    return mix(mixed) >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def mix(number: jax.Array) -> jax.Array:
    """A bijective hash uint32 → uint32; each bit of the result depends on all bits of `number`.

    Source: Wellons, 2018, "Prospecting for hash functions", lowbias32.
    """
    number = (number ^ (number >> 16)) * jnp.uint32(0x7FEB352D)
    number = (number ^ (number >> 15)) * jnp.uint32(0x846CA68B)
    return number ^ (number >> 16)


def drop_hidden(x: jax.Array, dropout: TokenDropout | None, place: int) -> jax.Array:
    """Drops hidden states `[T, I]` as `drop` does, with the key of `place`; without dropout, x."""
    if dropout is None or not dropout.hidden:
        return x
    return drop(x, dropout.keys[place], dropout.digests, dropout.hidden)


def map_key(keys: jax.Array, name: str) -> jax.Array:
    """The key, uint32 `[2]`, of the inputs of the adapter on a layer's map of this name."""
    return keys[ADAPTERS] ^ np.uint32(zlib.crc32(name.encode()))


# bool `[R, heads, L, L]`, by query and key, and the share p that is dropped. True: the weight is
# kept and divided by 1 - p; False: it becomes 0.
KeptWeights = tuple[jax.Array, float]


def kept_weights(dropout: TokenDropout | None, place: jax.Array, heads: int) -> KeptWeights | None:
    """Which attention weights are kept; None: all, undivided.

    The mask of a query for key k of head h is that of a token for feature 2¹⁶·h + k in `drop`.

    Args:
        dropout: with the keys of one layer.
        place: `[R, L]`, the place in the block of each token of a row.
    """
    if dropout is None or not dropout.attention:
        return None
    key = dropout.keys[ATTENTION_WEIGHTS]
    number = jnp.arange(heads, dtype=jnp.uint32)[:, None] * jnp.uint32(BETWEEN_HEADS)
    features = number + jnp.arange(place.shape[1], dtype=jnp.uint32)[None]
    of_keys = mix(features + key[1])  # [heads, L]
    of_queries = mix(dropout.digests ^ key[0])[place]  # [R, L]
    mask = _kept(of_queries[:, None, :, None] + of_keys[None, :, None], dropout.attention)
    return mask, dropout.attention

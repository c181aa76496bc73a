"""Dropout, in a trunk or on what enters low-rank adapters, with masks that do not depend on where a
row stands.

Training plays episodes with the embeddings of one pass and learns from those of another, which
packs the same rows into other blocks. Both must see the same masks. So a mask is a function of the
step's key, tower, layer, place in the layer (or linear map), the CONTENT of the row, position and
feature, and of nothing else. Equal rows of one step have equal masks, on any device.

A trunk drops where BERT does (Devlin et al., 2019): the embeddings, the weights of attention, and
what attention and the feed-forward add to the residual. It drops where its parameters have a key
alone, that is in the towers of a training step (`with_key`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLIER = 0x2C9277B5  # ≡ 5 mod 8: its powers differ as long as rows are
BETWEEN_POSITIONS = 0x9E3779B9  # odd, so that all positions of a row differ
BETWEEN_HEADS = 2**16  # above any position of a key

# Places where a trunk drops: numbers of their keys, at one depth. Depth 0 is before all layers.
EMBEDDINGS = 0
ATTENTION_WEIGHTS, ATTENTION_OUTPUT, GATED, OUTPUT = PLACES = range(4)

KEY = "dropout_key"  # beside the parameters of a tower whose trunk is to drop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenDropout:
    """What dropout has to know of the tokens in a block.

    Attributes:
        digests: uint32 `[T]`, of each token's row and position. rate: p, the share dropped of what
            enters adapters.
        keys: uint32 `[depths, places, 2]` of a trunk that drops, `[places, 2]` inside a layer.
        hidden, attention: p, the share it drops of hidden states and of attention's weights.
    """

    digests: jax.Array
    rate: float = dataclasses.field(default=0.0, metadata={"static": True})
    keys: jax.Array | None = None
    hidden: float = dataclasses.field(default=0.0, metadata={"static": True})
    attention: float = dataclasses.field(default=0.0, metadata={"static": True})


def row_digests(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """tokens `[N, L]`, lengths `[N]` → uint32 `[N]`: Σ_i (token_i + 1)·m^i modulo 2³².

    What stands beyond a row's length does not matter, nor does L. Two rows of one digest would
    have the same masks, which harms nothing.
    """
    width = tokens.shape[1]
    powers = np.array([pow(MULTIPLIER, i, 2**32) for i in range(width)], np.uint32)
    inside = jnp.arange(width) < lengths[:, None]
    terms = jnp.where(inside, tokens.astype(jnp.uint32) + 1, 0) * powers
    return terms.sum(axis=1, dtype=jnp.uint32)


def token_digests(rows: jax.Array, position: jax.Array) -> jax.Array:
    """Digests of the rows that tokens belong to and their positions there → uint32 `[T]`."""
    return rows + position.astype(jnp.uint32) * jnp.uint32(BETWEEN_POSITIONS)


def drop(x: jax.Array, key: jax.Array, dropout: TokenDropout) -> jax.Array:
    """`[T, I]` with each entry set to 0 with probability p, else divided by 1 - p; in x's dtype.

    `key` is that of one linear map in one layer, uint32 `[2]`, and p `dropout.rate`. Feature i of a
    token is dropped where mix(mix(digest ^ key_0) + mix(i + key_1)) / 2³² < p. Threefry, JAX's own
    generator, would nearly double the time of a pull-back on CPU.
    """
    return _drop(x, key, dropout.digests, dropout.rate)


def _drop(x: jax.Array, key: jax.Array, digests: jax.Array, rate: float) -> jax.Array:
    of_tokens = mix(digests ^ key[0])
    of_features = mix(jnp.arange(x.shape[1], dtype=jnp.uint32) + key[1])
    kept = _kept(of_tokens[:, None] + of_features, rate)
    return jnp.where(kept, x / (1 - rate), 0)


def _kept(mixed: jax.Array, rate: float) -> jax.Array:
    return mix(mixed) >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def mix(number: jax.Array) -> jax.Array:
    """uint32 → uint32, one to one, each bit of which depends on all (Wellons, 2018, "Prospecting
    for hash functions", lowbias32)."""
    number = (number ^ (number >> 16)) * jnp.uint32(0x7FEB352D)
    number = (number ^ (number >> 15)) * jnp.uint32(0x846CA68B)
    return number ^ (number >> 16)


# ---------------------------------------------------------------------- in a trunk


def with_key(params: Any, key: jax.Array) -> Any:
    """Stacked parameters whose trunk drops: of one tower with its PRNG key, or of several stacked
    on axis 0 with as many keys."""
    return params | {KEY: key}


def without_key(params: Any) -> tuple[Any, jax.Array | None]:
    """The parameters alone, and their key if they have one."""
    return {name: leaf for name, leaf in params.items() if name != KEY}, params.get(KEY)


def trunk_keys(key: jax.Array, layers: int) -> jax.Array:
    """A tower's PRNG key → uint32 `[layers + 1, places, 2]`, the keys of every place."""
    return jax.random.key_data(jax.random.split(key, (layers + 1, len(PLACES))))[..., :2]


def at_depth(dropout: TokenDropout | None, depth: int) -> TokenDropout | None:
    """With the keys of one depth alone: 0 before all layers, n in layer n - 1."""
    if dropout is None or dropout.keys is None:
        return dropout
    return dataclasses.replace(dropout, keys=dropout.keys[depth])


def drop_hidden(x: jax.Array, dropout: TokenDropout | None, place: int) -> jax.Array:
    """Hidden states `[T, I]` dropped as `drop` does, by the key of the place; x without dropout."""
    if dropout is None or dropout.keys is None or not dropout.hidden:
        return x
    return _drop(x, dropout.keys[place], dropout.digests, dropout.hidden)


class KeptWeights(NamedTuple):
    """mask: bool `[R, heads, L, L]`, of query and key, attention's weights that are kept and
    divided by 1 - rate; the others are 0."""

    mask: jax.Array
    rate: float


def kept_weights(dropout: TokenDropout | None, place: jax.Array, heads: int) -> KeptWeights | None:
    """Which of attention's weights are kept; None: all, as they are.

    Key k of head h is to a query what feature 2¹⁶·h + k is to a token in `drop`.

    Args:
        place: `[R, L]`, where the tokens of each row stand in the block.
    """
    if dropout is None or dropout.keys is None or not dropout.attention:
        return None
    key = dropout.keys[ATTENTION_WEIGHTS]
    number = jnp.arange(heads, dtype=jnp.uint32)[:, None] * jnp.uint32(BETWEEN_HEADS)
    of_keys = mix(number + jnp.arange(place.shape[1], dtype=jnp.uint32) + key[1])  # [heads, L]
    of_queries = mix(dropout.digests ^ key[0])[place]  # [R, L]
    mask = _kept(of_queries[:, None, :, None] + of_keys[:, None], dropout.attention)
    return KeptWeights(mask, dropout.attention)

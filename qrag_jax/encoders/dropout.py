"""Dropout on what enters low-rank adapters, with masks that do not depend on where a row stands.

Training plays episodes with the embeddings of one pass and learns from those of another, which
packs the same rows into other blocks. Both must see the same masks. So a mask is a function of the
step's key, tower, linear map, layer, the CONTENT of the row, position and feature, and of nothing
else. Equal rows of one step have equal masks, on any device.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLIER = 0x2C9277B5  # ≡ 5 mod 8: its powers differ as long as rows are
BETWEEN_POSITIONS = 0x9E3779B9  # odd, so that all positions of a row differ


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenDropout:
    """What dropout has to know of the tokens in a block.

    Attributes:
        digests: uint32 `[T]`, of each token's row and position. rate: p, the share dropped.
    """

    digests: jax.Array
    rate: float = dataclasses.field(metadata={"static": True})


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

    `key` is that of one linear map in one layer, uint32 `[2]`. Feature i of a token is dropped
    where mix(mix(digest ^ key_0) + mix(i + key_1)) / 2³² < p. Threefry, JAX's own generator, would
    nearly double the time of a pull-back on CPU.
    """
    of_tokens = mix(dropout.digests ^ key[0])
    of_features = mix(jnp.arange(x.shape[1], dtype=jnp.uint32) + key[1])
    least = np.uint32(min(round(dropout.rate * 2**32), 2**32 - 1))
    kept = mix(of_tokens[:, None] + of_features) >= least
    return jnp.where(kept, x / (1 - dropout.rate), 0)


def mix(number: jax.Array) -> jax.Array:
    """uint32 → uint32, one to one, each bit of which depends on all (Wellons, 2018, "Prospecting
    for hash functions", lowbias32)."""
    number = (number ^ (number >> 16)) * jnp.uint32(0x7FEB352D)
    number = (number ^ (number >> 15)) * jnp.uint32(0x846CA68B)
    return number ^ (number >> 16)

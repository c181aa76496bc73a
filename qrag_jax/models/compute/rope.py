"""Rotary position encoding of finished embeddings and in encoders (Su et al., arXiv 2104.09864).

`rotate` rotates each half of a finished embedding (one critic, see `policies.soft_q`) separately,
in pairs of neighbouring numbers, with theta 10000 (Q-RAG, arXiv 2511.07328). Angles come from
float64 tables of a coarse and a fine part of the position, so they are exact to float32 at any
position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

THETA = 10_000.0
_FINE = 1024  # positions in the fine table


def angles_at(
    positions: jax.Array, frequency: np.ndarray, last: int
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 `[..., n]`, at positions `[...]` from 0 to `last`, a static one.

    Args:
        frequency: float64 `[n]`, radians per position.
    """

    def table(values: np.ndarray) -> tuple[jax.Array, jax.Array]:
        angle = values[:, None] * frequency[None]
        return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)

    fine_cos, fine_sin = table(np.arange(min(last + 1, _FINE), dtype=np.float64))
    if last < _FINE:
        return fine_cos[positions], fine_sin[positions]
    coarse_cos, coarse_sin = table(_FINE * np.arange(last // _FINE + 1, dtype=np.float64))
    coarse, fine = positions // _FINE, positions % _FINE
    a_cos, a_sin, b_cos, b_sin = (
        coarse_cos[coarse],
        coarse_sin[coarse],
        fine_cos[fine],
        fine_sin[fine],
    )
    return a_cos * b_cos - a_sin * b_sin, a_sin * b_cos + a_cos * b_sin


def rotate(
    embeddings: jax.Array, positions: jax.Array, last: int, *, back: bool = False
) -> jax.Array:
    """Embeddings `[..., 2D]` rotated at integer positions `[...]` (0 to `last`), float32.

    Position 0 changes nothing. `back` undoes a rotation: `<s, R(p)a> = <R(-p)s, a>`.
    """
    if last == 0:
        return embeddings
    half = embeddings.shape[-1] // 2
    frequency = THETA ** (-np.arange(0, half, 2, dtype=np.float64) / half)
    cos, sin = angles_at(positions, frequency, last)
    sin = -sin if back else sin
    pairs = embeddings.astype(jnp.float32).reshape(*embeddings.shape[:-1], 2, -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for both halves
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(*rotated.shape[:-3], -1)


def rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x `[T, heads, d]` with the pairs (j, j + d/2) rotated by angles `[T, d/2]`, in x's dtype.

    Encoders use this rotation. `rotate`, for finished embeddings, pairs neighbours instead.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]  # the same for all heads
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)

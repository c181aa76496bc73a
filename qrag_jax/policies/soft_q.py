"""Soft Q-values of a two-tower encoder: two critics, a top-k softmax policy, a soft state value.

An embedding of width 2D is read as two halves, each the vector of one critic:
`q_i = <E_s[half i], E_a[half i]>` and `Q = q_1 + q_2` (Q-RAG, arXiv 2511.07328).
All values are float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qrag_jax.errors import Count, Positive
from qrag_jax.models.compute.precision import EXACT

MASKED = -1e30  # finite, so that a row without any action stays free of NaN
LEAST_BLOCK = 16  # chunks scored at a time of short documents; no search asks for more actions


@dataclasses.dataclass(frozen=True)
class SoftQConfig:
    """Section `policy`."""

    alpha: Positive = 0.05  # α_0, temperature; α_t = α_0·lr_t / lr_0
    top_k_actions: Count = 5  # k, number of best actions that are drawn from, and summed over in V


def twin_q(state: jax.Array, chunks: jax.Array) -> jax.Array:
    """state `[..., 2D]`, chunks `[..., C, 2D]` → the two critics' values `[..., C, 2]`."""
    state = state.reshape(*state.shape[:-1], 2, -1)
    chunks = chunks.reshape(*chunks.shape[:-1], 2, -1)
    return jnp.einsum("...hd,...chd->...ch", state, chunks, precision=EXACT)


def log_policy(q: jax.Array, available: jax.Array, alpha: jax.Array, top_k: int) -> jax.Array:
    """Log-probabilities of softmax(q / α) over the available actions among the top k.

    Args:
        q: `[..., C]` values.
        available: `[..., C]` bool.
        alpha: temperature, a scalar > 0.

    Returns:
        `[..., C]`, `MASKED` or less for actions that cannot be drawn.
    """
    q = jnp.where(available, q, MASKED)
    worst = jax.lax.top_k(q, min(top_k, q.shape[-1]))[0][..., -1:]
    drawable = available & (q >= worst)
    logits = jnp.where(drawable, (q - q.max(-1, keepdims=True)) / alpha, MASKED)
    return jnp.where(drawable, jax.nn.log_softmax(logits), MASKED)


def log_uniform(available: jax.Array) -> jax.Array:
    """Log-probabilities of the uniform policy over the available actions, `[..., C]`."""
    return jnp.where(available, -jnp.log(jnp.maximum(available.sum(-1, keepdims=True), 1)), MASKED)


def entropy(log_probabilities: jax.Array) -> jax.Array:
    """Entropy in nats, `[..., C]` → `[...]`."""
    return -(jnp.exp(log_probabilities) * jnp.maximum(log_probabilities, -1e4)).sum(-1)


def soft_value(twin: jax.Array, available: jax.Array, alpha: jax.Array, top_k: int) -> jax.Array:
    """`V = Σ_i α·logsumexp(q_i / α)`, each over the available actions in the top k of half i.

    Args:
        twin: `[..., C, 2]` values of the two critics.
        available: `[..., C]` bool.

    Returns:
        `[...]`; 0 where no action is available, because a state that has ended has the value 0.
    """
    q = jnp.where(available[..., None], twin, MASKED)
    best = jax.lax.top_k(jnp.moveaxis(q, -1, -2), min(top_k, q.shape[-2]))[0]
    # Subtract the maximum first, so that q/α does not overflow and α → 0 gives max(q).
    top = best[..., :1]
    value = top[..., 0] + alpha * jax.nn.logsumexp((best - top) / alpha, axis=-1)
    return jnp.where(available.any(-1), value.sum(-1), 0.0)

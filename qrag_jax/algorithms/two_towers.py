"""Losses of two towers: of PQN (Gallici et al., arXiv 2407.04811; Q-RAG, arXiv 2511.07328) with
twin soft Q-values and λ-returns (`advantages.gae`), and of imitation.

Imitation learns at every state which passages are needed next. Multi-hop dense retrieval (Xiong et
al., arXiv 2009.12756) learns the next gold passage of a fixed order. Where no order is known, any
passage still needed is right, so the loss is that of their summed probability.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a state without any passage stays free of NaN


def alpha_at(alpha: float, learning_rate: jax.Array, peak: float) -> jax.Array:
    """α_t = α_0·lr_t / lr_0, but at least 1e-6·α_0, so that a division by it stays finite."""
    return alpha * jnp.maximum(learning_rate / peak, 1e-6)


def pqn_loss(
    states: jax.Array, chunks: jax.Array, target: jax.Array, valid: jax.Array
) -> jax.Array:
    """`½(2q_1 - G)² + ½(2q_2 - G)²` summed over valid transitions.

    Args:
        states, chunks: embeddings `[..., 2D]`, of which each half belongs to one critic; chunks are
            rotated at their positions.
        target: `[...]` λ-returns G.
        valid: `[...]` bool.
    """
    product = states * chunks
    twin = product.reshape(*product.shape[:-1], 2, -1).sum(-1)
    errors = 0.5 * jnp.square(2.0 * twin - target[..., None]).sum(-1)
    return jnp.where(valid, errors, 0.0).sum()


def needed_next(rank: jax.Array, available: jax.Array) -> jax.Array:
    """The passages that a state needs next: of those not taken yet, the lowest in rank; ties all.

    Args:
        rank: `[..., C]` int32, place of a supporting fact in their order, negative for others.
        available: `[..., C]` bool, passages that are not taken.

    Returns:
        `[..., C]` bool, none if all supporting facts are taken.
    """
    missing = available & (rank >= 0)
    last = jnp.iinfo(jnp.int32).max
    lowest = jnp.where(missing, rank, last).min(axis=-1, keepdims=True)
    return missing & (rank == lowest)


def imitation_loss(
    logits: jax.Array, needed: jax.Array, available: jax.Array, valid: jax.Array
) -> jax.Array:
    """`-log Σ_{c needed} softmax(logits)_c` summed over valid states.

    Args:
        logits: `[..., C]` float32, scores of passages divided by the temperature.
        needed: `[..., C]` bool, the right ones, all available; at least one where `valid`.
        available: `[..., C]` bool, those that the softmax is over.
        valid: `[...]` bool.
    """
    every = jax.nn.logsumexp(jnp.where(available, logits, MASKED), axis=-1)
    right = jax.nn.logsumexp(jnp.where(needed, logits, MASKED), axis=-1)
    return jnp.where(valid, every - right, 0.0).sum()

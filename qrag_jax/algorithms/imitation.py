"""Supervised learning of search in several steps: at every state, which passages are needed next.

Multi-hop dense retrieval (Xiong et al., arXiv 2009.12756) learns the next gold passage of a fixed
order. Where no order is known, any passage still needed is right, so the loss is that of their
summed probability.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a state without any passage stays free of NaN


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


def loss(
    logits: jax.Array, needed: jax.Array, available: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`-log Σ_{c needed} softmax(logits)_c` summed over valid states, and their number.

    Args:
        logits: `[..., C]` float32, scores of passages divided by the temperature.
        needed: `[..., C]` bool, the right ones, all available; at least one where `valid`.
        available: `[..., C]` bool, those that the softmax is over.
        valid: `[...]` bool.
    """
    every = jax.nn.logsumexp(jnp.where(available, logits, MASKED), axis=-1)
    right = jax.nn.logsumexp(jnp.where(needed, logits, MASKED), axis=-1)
    return jnp.where(valid, every - right, 0.0).sum(), valid.sum().astype(jnp.float32)

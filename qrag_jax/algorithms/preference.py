"""Learning from pairs: which of two sequences with one prompt is the better one (IPO and DPO).

Arrays are `[N]`, of N pairs. The log-probability of a sequence is the sum over its tokens, or their
mean; the caller has chosen. Losses are a weighted sum and its weight, which add up over blocks and
devices to exactly those of the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.algorithms.policy_gradient import only, weighted_sum


class Pair(NamedTuple):
    """Log-probabilities `[N]` of the two sequences of each pair, in nats."""

    winner: jax.Array
    loser: jax.Array


def margins(policy: Pair, reference: Pair) -> jax.Array:
    """`h = (log π(w) − log π(l)) − (log ref(w) − log ref(l))`, `[N]` (Azar et al., eq. 17).

    It is 0 where the policy is the reference.
    """
    return (policy.winner - policy.loser) - (reference.winner - reference.loser)


def ipo_loss(h: jax.Array, weights: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """`Σ weight · (h − 1/(2β))²` and `Σ weight` (IPO, Azar et al., arXiv 2310.12036, eq. 17).

    Args:
        h: `[N]`, of `margins`.
        weights: `[N]`; a pair of weight 0 has no part in anything.
        beta: β, the paper's τ, above 0: the margin that is aimed at is 1/(2β) nats.
    """
    (h,) = only(weights > 0, h)
    return weighted_sum(jnp.square(h - 1.0 / (2.0 * beta)), weights), weights.sum()


def dpo_loss(
    h: jax.Array, weights: jax.Array, beta: float, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """`Σ weight · −log σ(β·h)` and `Σ weight` (DPO, Rafailov et al., arXiv 2305.18290, eq. 7).

    With a share ε of labels that are the wrong way round the loss is `−(1 − ε)·log σ(β·h) −
    ε·log σ(−β·h)` (Mitchell, "A note on DPO with noisy preferences", 2023, eq. 3): least where
    σ(β·h) is 1 − ε.

    Args:
        h: `[N]`, of `margins`.
        weights: `[N]`; a pair of weight 0 has no part in anything.
        beta: β, above 0.
        label_smoothing: ε, 0 to 0.5.
    """
    (h,) = only(weights > 0, h)
    losses = (1.0 - label_smoothing) * jax.nn.softplus(-beta * h)
    losses = losses + label_smoothing * jax.nn.softplus(beta * h)
    return weighted_sum(losses, weights), weights.sum()

"""Losses of policies: clipped importance ratios for GRPO and PPO, margins of pairs for IPO and DPO.

Arrays are `[N, T]`, or any shape where T plays no part; T is retrievals, or sampled tokens. Losses
are given for each action, and `aggregation` says how they are summed and what the sum is divided
by, so that micro-batches and devices add up to exactly the loss of the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Means over the actions of each episode and then over episodes (GRPO, arXiv 2402.03300, eq. 3;
# HARR, arXiv 2602.03645, eq. 12); over all actions (TRL's "bnpo"; DAPO, arXiv 2503.14476, eq. 8); a
# sum over the longest episode there can be, so that long episodes weigh no less (Dr. GRPO, arXiv
# 2503.20783). TRL's "bnpo" takes the mean of each micro-batch and its "dapo" that of the whole
# batch; here sums and divisors are added up first, so both are the mean of the whole batch.
GRPO, BNPO, DR_GRPO, DAPO = AGGREGATIONS = ("grpo", "bnpo", "dr_grpo", "dapo")
FURTHEST = 20.0  # bound of the logarithm of a ratio, as verl has it; e²⁰ is 5e8


class Clip(NamedTuple):
    """How far a ratio may go below and above 1 before its action is no longer reinforced."""

    low: float
    high: float


def clipped(log_prob: jax.Array, old: jax.Array, advantages: jax.Array, clip: Clip) -> jax.Array:
    """`−min(r·A, clip(r)·A)` with r = π/π_old, for each action (PPO, arXiv 1707.06347, eq. 7).

    An action whose ratio is beyond e^±`FURTHEST` has no gradient.

    Args:
        log_prob: of the policy that learns.
        old: of the policy that acted.
        advantages: A.
    """
    ratio = _ratio(log_prob, jax.lax.stop_gradient(old))
    bounded = jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high)
    return -jnp.minimum(ratio * advantages, bounded * advantages)


def clipped_weight(
    log_prob: jax.Array, old: jax.Array, advantages: jax.Array, clip: Clip
) -> jax.Array:
    """`−clip(r)·A·log π` with the ratio as a constant (CISPO, arXiv 2506.13585, eq. 4).

    No action loses its gradient. The paper bounds the ratio above alone: a `low` of 1.
    """
    ratio = _ratio(log_prob, old)
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high))
    return -bounded * advantages * log_prob


def of_sequence(log_prob: jax.Array, old: jax.Array, valid: jax.Array) -> jax.Array:
    """Log-probabilities whose ratio to `old` is that of the whole sequence, to the power 1/|valid|.

    Every action has the same ratio, but the gradient of its own log-probability (GSPO-token, arXiv
    2507.18071, eq. 14).

    Args:
        log_prob, old, valid: `[N, T]`.
    """
    difference = jnp.where(valid, log_prob - old, 0.0)
    count = jnp.maximum(valid.sum(axis=-1, keepdims=True).astype(jnp.float32), 1.0)
    mean = jax.lax.stop_gradient(difference.sum(axis=-1, keepdims=True) / count)
    return old + mean + log_prob - jax.lax.stop_gradient(log_prob)


def sampler_weights(old: jax.Array, sampler: jax.Array, most: float = 2.0) -> jax.Array:
    """`min(π_old / q, most)`, where q sampled and π_old is the same policy as the learner has it.

    A constant factor of an action's loss (truncated importance sampling, Ionides, 2008).
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(old - sampler), most))


def kl_k1(log_prob: jax.Array, reference: jax.Array) -> jax.Array:
    """`log π − log π_ref`: an estimate of KL(π, π_ref), without bias but of either sign.

    PPO subtracts it from rewards.
    """
    return log_prob - reference


def kl_k3(log_prob: jax.Array, reference: jax.Array) -> jax.Array:
    """`π_ref/π − 1 − log(π_ref/π)`: without bias and never negative (GRPO, eq. 4).

    GRPO adds it to the loss. It is constant once π_ref/π is above e^`FURTHEST`.
    """
    difference = jnp.minimum(reference - log_prob, FURTHEST)
    return jnp.exp(difference) - difference - 1.0


def clipped_value_loss(
    values: jax.Array, old: jax.Array, returns: jax.Array, most: float
) -> jax.Array:
    """`½·max((v − G)², (clip(v, v_old ± most) − G)²)` for each action."""
    old = jax.lax.stop_gradient(old)
    bounded = jnp.clip(values, old - most, old + most)
    return 0.5 * jnp.maximum(jnp.square(values - returns), jnp.square(bounded - returns))


def aggregation(name: str, counts: jax.Array, longest: int) -> tuple[jax.Array, jax.Array]:
    """The weight of an action's loss by its episode `[N]`, and the divisor of the weighed sum.

    A batch's loss is `sum(weight · loss) / divisor`; divisors add up over parts of the batch.

    Args:
        name: one of `AGGREGATIONS`.
        counts: float32 `[N]`, actions of each episode that are learned from; an episode without any
            counts nowhere.
        longest: most actions of an episode, for "dr_grpo".
    """
    episodes, ones = (counts > 0).sum().astype(jnp.float32), jnp.ones_like(counts)
    if name == GRPO:
        return 1.0 / jnp.maximum(counts, 1.0), episodes
    return ones, longest * episodes if name == DR_GRPO else counts.sum()


def weighted_sum(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """`Σ weight · loss` over actions of a weight above 0."""
    return (jnp.where(weights > 0, losses, 0.0) * weights).sum()


def is_clipped(log_prob: jax.Array, old: jax.Array, advantages: jax.Array, clip: Clip) -> jax.Array:
    """Whether the clip takes the gradient from an action."""
    ratio = _ratio(log_prob, old)
    above, below = ratio > 1.0 + clip.high, ratio < 1.0 - clip.low
    return (above & (advantages > 0)) | (below & (advantages < 0))


def largest_ratio(log_prob: jax.Array, old: jax.Array, valid: jax.Array) -> jax.Array:
    """The highest ratio of the valid actions, or its inverse; at least 1."""
    difference = jnp.where(valid, jnp.abs(log_prob - old), 0.0)
    return jnp.exp(jnp.minimum(difference.max(initial=0.0), FURTHEST))


def effective_share(weight: jax.Array, square: jax.Array) -> jax.Array:
    """The effective sample size (Kish, 1965) as a share of the actions: 1 if all weigh alike.

    Args:
        weight, square: means of `sampler_weights` and of their squares.
    """
    return jnp.square(weight) / jnp.maximum(square, 1e-30)


def _ratio(log_prob: jax.Array, old: jax.Array) -> jax.Array:
    """π/π_old. An infinite one makes a NaN of the gradient that the clip takes away."""
    return jnp.exp(jnp.clip(log_prob - old, -FURTHEST, FURTHEST))


# ------------------------------------------------------------------------ pairs

# Which of two sequences with one prompt is the better one. The log-probability of a sequence is the
# sum over its tokens, or their mean; the caller has chosen.


def margins(policy: jax.Array, reference: jax.Array) -> jax.Array:
    """`h = (log π(w) − log π(l)) − (log ref(w) − log ref(l))`, `[N]` (Azar et al., eq. 17).

    It is 0 where the policy is the reference.

    Args:
        policy, reference: `[N, 2]`, log-probabilities of winner and loser.
    """
    return (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])


def ipo_loss(h: jax.Array, weights: jax.Array, beta: float) -> jax.Array:
    """`Σ weight · (h − 1/(2β))²` (IPO, Azar et al., arXiv 2310.12036, eq. 17).

    Args:
        h: `[N]`, of `margins`.
        weights: `[N]`; a pair of weight 0 has no part in anything.
        beta: β, the paper's τ, above 0: the margin that is aimed at is 1/(2β) nats.
    """
    h = jnp.where(weights > 0, h, 0.0)  # a NaN would be one in the gradient
    return weighted_sum(jnp.square(h - 1.0 / (2.0 * beta)), weights)


def dpo_loss(
    h: jax.Array, weights: jax.Array, beta: float, label_smoothing: float = 0.0
) -> jax.Array:
    """`Σ weight · −log σ(β·h)` (DPO, Rafailov et al., arXiv 2305.18290, eq. 7).

    With a share ε of labels that are the wrong way round the loss is `−(1 − ε)·log σ(β·h) −
    ε·log σ(−β·h)` (Mitchell, "A note on DPO with noisy preferences", 2023, eq. 3): least where
    σ(β·h) is 1 − ε.

    Args:
        h, weights: as in `ipo_loss`.
        beta: β, above 0.
        label_smoothing: ε, 0 to 0.5.
    """
    h = jnp.where(weights > 0, h, 0.0)
    losses = (1.0 - label_smoothing) * jax.nn.softplus(-beta * h)
    losses = losses + label_smoothing * jax.nn.softplus(beta * h)
    return weighted_sum(losses, weights)

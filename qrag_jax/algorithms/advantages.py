"""Advantages of policy gradients: how much better an action was than what was to be expected.

Arrays are `[groups, members]` where several episodes of one question are compared (GRPO; Shao et
al., arXiv 2402.03300), and `[N, T]` where the T actions of an episode are: retrievals, or sampled
tokens. What is not valid is never read, not even a NaN, and gets the advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

EPSILON = 1e-4  # added to a standard deviation, as TRL has it


def group_advantages(rewards: jax.Array, valid: jax.Array, *, scaled: bool = True) -> jax.Array:
    """Rewards less the mean of their group, over its standard deviation.

    A group of fewer than two valid members, or of equal rewards, has advantages of 0.

    Args:
        rewards: `[groups, members]`.
        valid: `[groups, members]` bool; others leave mean and deviation as well.
        scaled: divide by the deviation (n − 1 degrees of freedom); Dr. GRPO (arXiv 2503.20783) does
            not.

    Returns:
        `[groups, members]`.
    """
    count = valid.sum(axis=-1, keepdims=True).astype(jnp.float32)
    rewards = jnp.where(valid, rewards, 0.0)
    mean = rewards.sum(axis=-1, keepdims=True) / jnp.maximum(count, 1.0)
    advantages = jnp.where(valid, rewards - mean, 0.0)
    if scaled:
        squares = jnp.square(advantages).sum(axis=-1, keepdims=True)
        advantages /= jnp.sqrt(squares / jnp.maximum(count - 1.0, 1.0)) + EPSILON
    return jnp.where(valid & varies(rewards, valid)[..., None], advantages, 0.0)


def varies(rewards: Any, valid: Any) -> Any:
    """Whether a group's valid members have different rewards, `[groups, members]` → `[groups]`.

    Nothing can be learned from the other groups. It computes NumPy's arrays on the host.
    """
    low = rewards.min(axis=-1, where=valid, initial=jnp.inf)
    return rewards.max(axis=-1, where=valid, initial=-jnp.inf) > low


def mixed_advantages(
    rewards: Sequence[jax.Array], weights: Sequence[float], valid: jax.Array, *, scaled: bool = True
) -> jax.Array:
    """Of several rewards: each is normalised in its group, the weighted sum once more.

    So a reward counts by its weight, whatever its unit is.

    Args:
        rewards: `[groups, members]` each.
        weights: one for each reward; below 0 for what is to be avoided.

    Returns:
        `[groups, members]`.
    """
    if len(rewards) == len(weights) == 1:
        return group_advantages(weights[0] * rewards[0], valid, scaled=scaled)
    parts = [group_advantages(one, valid) for one in rewards]
    total = sum((weight * one for weight, one in zip(weights, parts, strict=True)), jnp.zeros(()))
    return group_advantages(total, valid, scaled=scaled)


def best_of_groups(rewards: jax.Array, valid: jax.Array) -> jax.Array:
    """1 for each group's best valid member (the first of equals), 0 for all else.

    With these in place of advantages a policy imitates the best of its own tries (Dong et al.,
    arXiv 2304.06767). A group whose members do not differ has none.

    Args:
        rewards, valid: `[groups, members]`.

    Returns:
        `[groups, members]`, float32.
    """
    best = jnp.argmax(jnp.where(valid, rewards, -jnp.inf), axis=-1)
    chosen = jnp.arange(rewards.shape[-1])[None] == best[:, None]
    return (chosen & varies(rewards, valid)[:, None]).astype(jnp.float32)


def step_advantages(rewards: jax.Array, valid: jax.Array, *, scaled: bool = True) -> jax.Array:
    """Of rewards per action: normalised over all actions of a group, then summed to the end.

    Args:
        rewards, valid: `[groups, members, T]`.

    Returns:
        `[groups, members, T]`.
    """
    flat = rewards.shape[0], -1
    normal = group_advantages(rewards.reshape(flat), valid.reshape(flat), scaled=scaled)
    to_go = jnp.cumsum(normal.reshape(rewards.shape)[..., ::-1], axis=-1)[..., ::-1]
    return jnp.where(valid, to_go, 0.0)


def gae(
    rewards: jax.Array,
    values: jax.Array,
    valid: jax.Array,
    ends: jax.Array,
    discounts: tuple[float, float],
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantages (Schulman et al., arXiv 1506.02438) of whole episodes.

    Several may lie one after the other in a row. Actions that are not valid are passed over: the
    next state of an action is that of the next valid one. Nothing is bootstrapped behind the last
    one. All is computed at once, in log2(T) steps.

    Args:
        rewards, values, valid: `[..., T]`; the value is that of the state acted in.
        ends: `[..., T]` bool, the last valid action of each episode. Nothing crosses it.
        discounts: γ and λ.

    Returns:
        the advantages, and the returns that values are regressed on: advantages + values, which are
        the λ-returns `G_t = r_t + γ·[(1 − λ)·v_{t+1} + λ·G_{t+1}]` (Sutton & Barto, eq. 12.18).
    """
    gamma, lambda_ = discounts
    rewards, values = (jnp.where(valid, array, 0.0) for array in (rewards, values))
    goes_on = jnp.where(ends, 0.0, 1.0)
    # What is seen from an action on: the value of the next valid one, itself included.
    seen = _backward(jnp.where(valid, 0.0, 1.0), values)
    after = jnp.pad(seen[..., 1:], [(0, 0)] * (seen.ndim - 1) + [(0, 1)]) * goes_on
    errors = jnp.where(valid, rewards + gamma * after - values, 0.0)
    factors = jnp.where(valid, gamma * lambda_ * goes_on, 1.0)
    advantages = jnp.where(valid, _backward(factors, errors), 0.0)
    return advantages, jnp.where(valid, advantages + values, 0.0)


def ends_of(valid: jax.Array) -> jax.Array:
    """The last valid action of each row `[..., T]`, which is one episode."""
    following = jnp.pad(valid[..., 1:], [(0, 0)] * (valid.ndim - 1) + [(0, 1)])
    return valid & ~following


def _backward(factors: jax.Array, terms: jax.Array) -> jax.Array:
    """x with `x[t] = factors[t] · x[t + 1] + terms[t]`, and 0 behind the end of the last axis."""

    def joined(later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]):
        return earlier[0] * later[0], earlier[0] * later[1] + earlier[1]

    last = factors.ndim - 1
    return jax.lax.associative_scan(joined, (factors, terms), reverse=True, axis=last)[1]


def whitened(advantages: jax.Array, valid: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 (n − 1 degrees of freedom) over all valid actions, of any shape."""
    count = valid.sum().astype(jnp.float32)
    kept = jnp.where(valid, advantages, 0.0)
    centred = jnp.where(valid, kept - kept.sum() / jnp.maximum(count, 1.0), 0.0)
    variance = jnp.square(centred).sum() / jnp.maximum(count - 1.0, 1.0)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def explained_variance(returns: jax.Array, values: jax.Array, valid: jax.Array) -> jax.Array:
    """1 less the share of the returns' variance that values leave, of any shape."""
    number = jnp.maximum(valid.sum().astype(jnp.float32), 1.0)
    error = jnp.where(valid, returns - values, 0.0)
    spread = jnp.where(valid, jnp.square(returns - returns.sum() / number), 0.0).sum()
    return 1.0 - jnp.square(error).sum() / jnp.maximum(spread, 1e-8)


def discounted_return(r_t: jax.Array, gamma: float) -> jax.Array:
    """`Σ_t γ^t·r_t` of one episode, r_t `[T]` → scalar."""
    return (r_t * gamma ** jnp.arange(r_t.shape[0], dtype=r_t.dtype)).sum()

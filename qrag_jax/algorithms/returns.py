"""Return estimators shared by the algorithms: pure, unbatched functions of one trajectory.

Names carry time as in rlax: `r_t` is the reward of the action taken in state t, `discount_t` is
γ·(1 - done_t), so an episode's end is a zero and needs no branch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def lambda_returns(
    r_t: jax.Array, discount_t: jax.Array, v_tp1: jax.Array, lambda_: float
) -> jax.Array:
    """λ-returns `G_t = r_t + discount_t·[(1-λ)·v_{t+1} + λ·G_{t+1}]`, with `G_T = v_T`.

    Args:
        r_t: `[T]`, rewards.
        discount_t: `[T]`, γ·(1 - done_t).
        v_tp1: `[T]`, the value of the state that each action led to. Its last entry bootstraps a
            rollout that stops before the episode does.
        lambda_: 0 gives one-step targets, 1 gives the discounted sum of rewards.

    Returns:
        `[T]`. (Sutton & Barto, 2018, eq. 12.18; the recursion of rlax `lambda_returns`.)
    """

    def backward(g_tp1: jax.Array, step: tuple[jax.Array, jax.Array, jax.Array]):
        reward, discount, value = step
        g_t = reward + discount * ((1 - lambda_) * value + lambda_ * g_tp1)
        return g_t, g_t

    _, returns = jax.lax.scan(backward, v_tp1[-1], (r_t, discount_t, v_tp1), reverse=True)
    return returns


def discounted_return(r_t: jax.Array, gamma: float) -> jax.Array:
    """`Σ_t γ^t·r_t` of one episode, r_t `[T]` → scalar."""
    return (r_t * gamma ** jnp.arange(r_t.shape[0], dtype=r_t.dtype)).sum()

"""PQN with λ-returns and twin soft Q-values (Gallici et al., arXiv 2407.04811; Q-RAG, arXiv
2511.07328)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qrag_jax.algorithms.advantages import lambda_returns


def alpha_at(alpha: float, learning_rate: jax.Array, peak: float) -> jax.Array:
    """α_t = α_0·lr_t / lr_0, but at least 1e-6·α_0, so that a division by it stays finite."""
    return alpha * jnp.maximum(learning_rate / peak, 1e-6)


def targets(
    rewards: jax.Array, done: jax.Array, values: jax.Array, gamma: float, lambda_: float
) -> jax.Array:
    """λ-returns `[B, T]` of whole episodes from the soft values of the target towers.

    `values[:, t+1]` is the value of the state that step t led to. The last step of a whole episode
    ends it, so nothing is bootstrapped there.

    Args:
        rewards: `[B, T]`, of each step.
        done: `[B, T]`, whether the episode has ended after the step.
        values: `[B, T]`, of the states acted in.
        gamma: γ, the discount.
        lambda_: λ of the returns.
    """
    discount = gamma * (1.0 - done.astype(jnp.float32))
    next_values = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
    returns = jax.vmap(lambda_returns, (0, 0, 0, None))
    return returns(rewards, discount, next_values, lambda_)


def loss(
    state_embeddings: jax.Array, chunk_embeddings: jax.Array, target: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`½(2q_1 - G)² + ½(2q_2 - G)²` summed over valid transitions, and their number.

    Args:
        state_embeddings: `[..., 2D]`; each half belongs to one critic.
        chunk_embeddings: `[..., 2D]`, rotated at the chunks' positions.
        target: `[...]` λ-returns G.
        valid: `[...]` bool.
    """
    product = state_embeddings * chunk_embeddings
    return twin_loss(product.reshape(*product.shape[:-1], 2, -1).sum(-1), target, valid)


def twin_loss(twin: jax.Array, target: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `loss`, from the two critics' values `[..., 2]`."""
    errors = 0.5 * jnp.square(2.0 * twin - target[..., None]).sum(-1)
    return jnp.where(valid, errors, 0.0).sum(), valid.sum().astype(jnp.float32)

"""Ordered draws of k passages without replacement from a pool: the Plackett–Luce policy.

The first passage is drawn from the softmax of the logits, the next one from the softmax over those
that are left, and so on (Plackett, 1975; HARR, arXiv 2602.03645, eq. 7 and 8). A draw is one
perturbation of all logits by Gumbel noise, whose k highest come in the order in which they would be
drawn (Kool et al., arXiv 1903.06059). All values are float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qrag_jax.errors import Count, InputError, Positive
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.policies.soft_q import MASKED

NOTHING = -1  # in the place of an action: the pool had no passage left


@dataclasses.dataclass(frozen=True)
class PlackettLuceConfig:
    """Section `policy`."""

    tau: Positive = 0.05  # τ, temperature of the scores
    pool: Count = 30  # K, best passages of the index that are drawn from
    passages: Count = 3  # k, passages that are drawn

    def __post_init__(self) -> None:
        if self.passages > self.pool:
            raise InputError(
                f"config.policy.passages is {self.passages}; at most the pool, {self.pool}, can be."
            )


def pool_logits(queries: jax.Array, pool: jax.Array, present: jax.Array, tau: float) -> jax.Array:
    """Inner products over τ.

    Args:
        queries: `[..., D]`.
        pool: `[..., K, D]`, the vectors of the pool's passages.
        present: `[..., K]` bool, whether there is a passage.

    Returns:
        `[..., K]`, `MASKED` where there is none.
    """
    scores = jnp.einsum("...d,...kd->...k", queries, pool, precision=EXACT)
    return jnp.where(present, scores / tau, MASKED)


def draw(key: jax.Array, logits: jax.Array, k: int) -> jax.Array:
    """Draws k places of one pool, int32 `[k]` in the order drawn; `NOTHING` once it is empty.

    Args:
        logits: `[K]`, `MASKED` where there is no passage.
    """
    noisy = logits + jax.random.gumbel(key, logits.shape)
    return greedy(jnp.where(logits > MASKED, noisy, MASKED), k)


def greedy(logits: jax.Array, k: int) -> jax.Array:
    """The k best places, best first, `[..., K]` → int32 `[..., k]`; of equal ones the first."""
    best, places = jax.lax.top_k(logits, k)
    return jnp.where(best > MASKED, places.astype(jnp.int32), NOTHING)


def log_prob(logits: jax.Array, actions: jax.Array) -> jax.Array:
    """Log-probability of ordered draws: `Σ_i [l_{a_i} − logsumexp of those not drawn before]`.

    Args:
        logits: `[..., K]`, `MASKED` where there is no passage.
        actions: int32 `[..., k]`, distinct places with a passage, then `NOTHING`.

    Returns:
        `[...]`; 0 where nothing was drawn.
    """
    taken = jax.nn.one_hot(actions, logits.shape[-1], dtype=jnp.int32)  # of NOTHING: all 0
    before = jnp.cumsum(taken, axis=-2) - taken
    left = jnp.where(before > 0, MASKED, logits[..., None, :])
    # Of a gather the gradient would be a scatter, which a deterministic GPU adds up one by one.
    chosen = jnp.where(taken > 0, logits[..., None, :], 0.0).sum(axis=-1)
    log_probs = chosen - jax.nn.logsumexp(left, axis=-1)
    return jnp.where(actions != NOTHING, log_probs, 0.0).sum(axis=-1)


def entropy(logits: jax.Array) -> jax.Array:
    """Entropy of the first passage drawn, in nats, `[..., K]` → `[...]`; 0 for an empty pool."""
    log_probabilities = jax.nn.log_softmax(logits)
    probabilities = jnp.exp(log_probabilities) * jnp.where(logits > MASKED, log_probabilities, 0.0)
    return -jnp.where(logits > MASKED, probabilities, 0.0).sum(axis=-1)

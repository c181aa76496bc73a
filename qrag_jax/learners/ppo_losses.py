"""What PPO's policy and critic learn from each sampled token of a block, and the sums of it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.algorithms.policy_gradient import (
    clipped,
    clipped_value_loss,
    kl_k3,
    sampler_weights,
    weighted_sum,
)
from qrag_jax.learners.block_loss import token_count
from qrag_jax.learners.ppo_config import LOSS, TokenPPOConfig
from qrag_jax.learners.token_losses import Sums, TokenLosses, summed
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.policies.tokens import TokenScores
from qrag_jax.rollouts.token_blocks import TokenBlocks


class PerAction(NamedTuple):
    """What is learned from each sampled token; float32 `[B, S]`.

    old: log-probabilities before the update; read if a batch gives several steps.
    reference: by the first weights of the stage; read if a KL is in the loss.
    advantages: A.
    weight: of the token's losses in their sums; 0: it is not learned from.
    value: by the critic before the update.
    returns: what values are regressed on.
    """

    old: jax.Array
    reference: jax.Array
    advantages: jax.Array
    weight: jax.Array
    value: jax.Array
    returns: jax.Array


class ValueSums(NamedTuple):
    """Totals over the tokens that are learned from."""

    loss: jax.Array
    tokens: TokenCount

    def plus(self, more: ValueSums) -> ValueSums:
        """The totals of both."""
        return jax.tree.map(jnp.add, self, more)

    def over(self, axes: tuple[str, ...]) -> ValueSums:
        """The totals of all devices along axes of the mesh."""
        return jax.lax.psum(self, axes)


@dataclasses.dataclass(frozen=True)
class PpoLoss:
    """The clipped surrogate of each token, weighted for its sampler, the KL and the entropy."""

    config: TokenPPOConfig

    def __call__(
        self, scores: TokenScores, block: TokenBlocks, given: PerAction
    ) -> tuple[jax.Array, Sums]:
        """The summed loss of one block, and the sums."""
        config, new, clip = self.config, scores.log_probs, self.config.clip
        # If a batch gives one step, its tokens are of the policy that learns.
        old = jax.lax.stop_gradient(new) if config.updates_per_batch == 1 else given.old
        losses = clipped(new, old, given.advantages, clip)
        losses = losses * sampler_weights(old, block.sampler, config.sampler_cap)
        kl = jnp.zeros_like(new)
        if config.kl and config.kl_in == LOSS:
            kl = kl_k3(new, given.reference)
            losses += config.kl * kl
        if config.entropy:
            losses -= config.entropy * scores.entropy
        each = TokenLosses(losses, new, old, kl)
        return summed(each, scores, block, given, clip=clip, cap=config.sampler_cap)


@dataclasses.dataclass(frozen=True)
class ValueLoss:
    """The clipped squared error of each value."""

    most: float  # how far a value may move from the one before the update

    def __call__(
        self, scores: jax.Array, block: TokenBlocks, given: PerAction
    ) -> tuple[jax.Array, ValueSums]:
        """The summed loss of one block, and the sums."""
        each = clipped_value_loss(scores, given.value, given.returns, self.most)
        loss = weighted_sum(each, given.weight)
        return loss, ValueSums(loss, token_count(block))

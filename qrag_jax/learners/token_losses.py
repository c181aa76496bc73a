"""What GRPO and imitation learn from each sampled token of a block, and the sums of it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from qrag_jax.algorithms.policy_gradient import (
    USUAL,
    Clip,
    Correction,
    Departure,
    clipped,
    clipped_weight,
    correction,
    departure,
    kl_k3,
    of_sequence,
    sampler_weights,
    weighted_sum,
)
from qrag_jax.learners.token_config import CISPO, SEQUENCE, TokenGRPOConfig
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.policies.tokens import TokenScores
from qrag_jax.rollouts.token_blocks import TokenBlocks


class BlockSums(Protocol):
    """Totals over blocks: a pytree of arrays."""

    def plus(self, more: Self) -> Self:
        """The totals of both."""

    def over(self, axes: tuple[str, ...]) -> Self:
        """The totals of all devices along axes of the mesh, under `jax.shard_map`."""


Given = TypeVar("Given", contravariant=True)
Summed = TypeVar("Summed", bound=BlockSums, covariant=True)


class BlockLoss(Protocol[Given, Summed]):
    """The loss of one block."""

    def __call__(self, scores: Any, block: TokenBlocks, given: Given) -> tuple[jax.Array, Summed]:
        """The summed loss, of which the gradient is taken, and the sums.

        Args:
            scores: `[S]`, what is read of the sampled tokens of the block, see `token_policy`.
            block: without the axis of blocks.
            given: what the block is learned with; a pytree of arrays.
        """


def token_count(block: TokenBlocks) -> TokenCount:
    """The tokens of a block, those that rows share counted once, and its places."""
    by_group = block.lengths.reshape(len(block.shared), -1)
    alone = jnp.where(by_group > 0, by_group - block.shared[:, None], 0).sum()
    real = (alone + block.shared.sum()).astype(jnp.float32)
    return TokenCount(real, jnp.float32(len(block.tokens)))


class PerToken(NamedTuple):
    """What is learned from each sampled token; float32 `[B, S]`.

    old: log-probabilities before the update; read if there are several updates.
    reference: by the first weights of the stage; read if a KL is to them.
    advantages: A.
    weight: of the token's loss in the sum; 0: it is not learned from.
    """

    old: jax.Array
    reference: jax.Array
    advantages: jax.Array
    weight: jax.Array


class Sums(NamedTuple):
    """Totals over the tokens that are learned from."""

    loss: jax.Array
    entropy: jax.Array
    reference_kl: jax.Array
    departure: Departure
    correction: Correction
    tokens: TokenCount

    def plus(self, more: Sums) -> Sums:
        """The totals of both."""
        departure = jnp.maximum(self.departure.largest, more.departure.largest)
        correction = jnp.maximum(self.correction.largest, more.correction.largest)
        return jax.tree.map(jnp.add, self, more)._largest(departure, correction)

    def over(self, axes: tuple[str, ...]) -> Sums:
        """The totals of all devices along axes of the mesh."""
        largest = jax.lax.pmax((self.departure.largest, self.correction.largest), axes)
        return jax.lax.psum(self, axes)._largest(*largest)

    def _largest(self, departure: jax.Array, correction: jax.Array) -> Sums:
        return self._replace(
            departure=self.departure._replace(largest=departure),
            correction=self.correction._replace(largest=correction),
        )


class TokenLosses(NamedTuple):
    """Of each sampled token `[S]`.

    each: the losses.
    ratios: log-probabilities whose ratio to `old` the losses have.
    old: log-probabilities before the update.
    kl: to the reference.
    """

    each: jax.Array
    ratios: jax.Array
    old: jax.Array
    kl: jax.Array


class ImitationLoss:
    """`−log π` of each token."""

    def __call__(
        self, scores: TokenScores, block: TokenBlocks, given: PerToken
    ) -> tuple[jax.Array, Sums]:
        """The summed loss of one block, and the sums."""
        new = scores.log_probs
        losses = TokenLosses(-new, new, jax.lax.stop_gradient(new), jnp.zeros_like(new))
        return summed(losses, scores, block, given)


@dataclasses.dataclass(frozen=True)
class GrpoLoss:
    """The clipped surrogate of each token, weighted for its sampler, and the KL."""

    config: TokenGRPOConfig

    def __call__(
        self, scores: TokenScores, block: TokenBlocks, given: PerToken
    ) -> tuple[jax.Array, Sums]:
        """The summed loss of one block, and the sums."""
        config, new, clip = self.config, scores.log_probs, self.config.clip
        old = jax.lax.stop_gradient(new) if config.epochs == 1 else given.old
        kl = kl_k3(new, given.reference) if config.beta else jnp.zeros_like(new)
        ratios = new
        if config.ratio == SEQUENCE:
            rows = jnp.arange(len(block.lengths))[:, None] == block.row[None]
            ratios = _of_rows(new, old, rows & (given.weight > 0)[None])
        surrogate = clipped_weight if config.ratio == CISPO else clipped
        losses = surrogate(ratios, old, given.advantages, clip)
        losses = losses * sampler_weights(old, block.sampler, config.sampler_cap)
        each = TokenLosses(losses + config.beta * kl, ratios, old, kl)
        return summed(each, scores, block, given, clip=clip, cap=config.sampler_cap)


class Weighed(Protocol):
    """What is read here of what each token is learned with: see `PerToken`."""

    @property
    def advantages(self) -> jax.Array: ...
    @property
    def weight(self) -> jax.Array: ...


def summed(
    losses: TokenLosses,
    scores: TokenScores,
    block: TokenBlocks,
    given: Weighed,
    *,
    clip: Clip = USUAL,
    cap: float = 1.0,
) -> tuple[jax.Array, Sums]:
    """The weighed loss of one block, and the sums."""
    loss, valid = weighted_sum(losses.each, given.weight), given.weight > 0
    # What is clipped is of the ratios that the loss has; a KL is of tokens.
    away = departure(losses.ratios, losses.old, given.advantages, valid, clip)
    apart = departure(scores.log_probs, losses.old, given.advantages, valid, clip)
    return loss, Sums(
        loss=loss,
        entropy=jnp.where(valid, scores.entropy, 0.0).sum(),
        reference_kl=jnp.where(valid, losses.kl, 0.0).sum(),
        departure=away._replace(kl=apart.kl),
        correction=correction(losses.old, block.sampler, valid, cap),
        tokens=token_count(block),
    )


def _of_rows(new: jax.Array, old: jax.Array, rows: jax.Array) -> jax.Array:
    """`of_sequence` of tokens `[S]`, where `rows` `[R, S]` says which token is of which row."""
    by_row = of_sequence(jnp.broadcast_to(new, rows.shape), jnp.broadcast_to(old, rows.shape), rows)
    return jnp.where(rows.any(axis=0), jnp.where(rows, by_row, 0.0).sum(axis=0), new)

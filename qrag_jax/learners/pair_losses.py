"""What IPO and DPO learn from the pairs of rows of a block, and the sums of it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.algorithms.preference import Pair, dpo_loss, ipo_loss, margins
from qrag_jax.learners.block_loss import token_count
from qrag_jax.learners.preference_config import IPO, PreferenceConfig
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.policies.tokens import TokenScores
from qrag_jax.rollouts.token_blocks import TokenBlocks


class PerPair(NamedTuple):
    """What is learned from each group of a block, which is a pair; float32.

    reference: `[B, Q, 2]`, log-probabilities of winner and loser by the reference.
    weight: `[B, Q]`, of the pair's loss in the sum; 0: there is no pair.
    """

    reference: jax.Array
    weight: jax.Array


class PairSums(NamedTuple):
    """Totals over the pairs that are learned from; float32 scalars.

    loss, weight: of `algorithms.preference`.
    pairs: their number.
    margin: of h.
    right: number of pairs whose h is above 0.
    winner, loser: of the log-probabilities of sequences.
    actions: number of sampled tokens.
    tokens: of all rows.
    """

    loss: jax.Array
    weight: jax.Array
    pairs: jax.Array
    margin: jax.Array
    right: jax.Array
    winner: jax.Array
    loser: jax.Array
    actions: jax.Array
    tokens: TokenCount

    def plus(self, more: PairSums) -> PairSums:
        """The totals of both."""
        return jax.tree.map(jnp.add, self, more)

    def over(self, axes: tuple[str, ...]) -> PairSums:
        """The totals of all devices along axes of the mesh."""
        return jax.lax.psum(self, axes)


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """IPO or DPO of pairs; the first row of a group is the winner, the second the loser."""

    config: PreferenceConfig

    def __call__(
        self, scores: TokenScores, block: TokenBlocks, given: PerPair
    ) -> tuple[jax.Array, PairSums]:
        """The summed loss of one block, and the sums."""
        config, weight, learned = self.config, given.weight, block.learned
        policy = Pair(*self._of_rows(scores.log_probs, block).reshape(-1, 2).T)
        h = margins(policy, Pair(*given.reference.T))
        if config.loss == IPO:
            loss, total = ipo_loss(h, weight, config.beta)
        else:
            loss, total = dpo_loss(h, weight, config.beta, config.label_smoothing)

        def over_pairs(each: jax.Array) -> jax.Array:
            return jnp.where(weight > 0, each, 0).sum().astype(jnp.float32)

        return loss, PairSums(
            loss=loss,
            weight=total,
            pairs=over_pairs(jnp.ones_like(h)),
            margin=over_pairs(h),
            right=over_pairs(h > 0),
            winner=over_pairs(policy.winner),
            loser=over_pairs(policy.loser),
            actions=learned.sum().astype(jnp.float32),
            tokens=token_count(block),
        )

    def _of_rows(self, log_probs: jax.Array, block: TokenBlocks) -> jax.Array:
        """Log-probabilities `[R]` of sequences, from those of tokens `[S]`; 0 where no row is."""
        rows = jnp.arange(len(block.lengths))[:, None] == block.row[None]
        rows = rows & block.learned[None]
        total = jnp.where(rows, log_probs[None], 0.0).sum(axis=1)
        return total / jnp.maximum(rows.sum(axis=1), 1) if self.config.averaged else total

"""Updates of a small token policy by pairs, and the same losses by their definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.learners.preference_config import IPO, PreferenceConfig
from qrag_jax.learners.preference_update import (
    make_preference_update,
    pair_episodes,
    row_log_probs,
)
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import BlockShape
from tests.learners.token_updates import Learning, log_probs
from tests.rollouts.pair_rows import CUT_OFF, LONGEST, NO_WEIGHT, PAIRS

SHAPE = BlockShape(tokens=64, length=LONGEST, groups=3, members=2, sampled=48)


def made_weights() -> np.ndarray:
    """Of each pair."""
    weights = np.random.default_rng(6).random(PAIRS).astype(np.float32) + 0.2
    weights[NO_WEIGHT] = 0.0
    return weights


def kept() -> np.ndarray:
    """The pairs that are learned from."""
    return np.setdiff1d(np.arange(PAIRS), [NO_WEIGHT, CUT_OFF])


def of_sequences(params: Params, batch: TokenBatch, config: PreferenceConfig) -> jax.Array:
    """Log-probability `[N]` of each episode, row by row without packing."""
    mask = batch.loss_mask[: len(batch.scored)]
    total = jnp.where(mask, log_probs(params, batch)[: len(mask)], 0.0).sum(axis=1)
    return total / np.maximum(mask.sum(axis=1), 1) if config.averaged else total


def loss(
    params: Params,
    batch: TokenBatch,
    config: PreferenceConfig,
    reference: np.ndarray,
    weights: np.ndarray,
) -> Any:
    """The mean loss, pair by pair, as the papers have it."""
    policy, total = of_sequences(params, batch, config), 0.0
    for pair in kept():
        winner, loser = 2 * pair, 2 * pair + 1
        h = (policy[winner] - policy[loser]) - (reference[winner] - reference[loser])
        if config.loss == IPO:
            each = (h - 1 / (2 * config.beta)) ** 2
        else:
            wrong = config.label_smoothing
            right = jax.nn.sigmoid(config.beta * h)
            each = -(1 - wrong) * jnp.log(right) - wrong * jnp.log(1 - right)
        total += weights[pair] * each
    return total / weights[kept()].sum()


class PairLearning(Learning):
    """A learner from pairs on a mesh, with plain gradient descent, and its state."""

    def made_update(self) -> Any:
        """The program of an update."""
        return make_preference_update(self.policy)

    def step_by(
        self, batch: TokenBatch, reference: np.ndarray, weights: np.ndarray
    ) -> dict[str, float]:
        """One update; returns its metrics."""
        return self.learn(pair_episodes(self.policy, batch, self.shape, reference, weights))

    def reference(self, batch: TokenBatch) -> np.ndarray:
        """Log-probabilities of the episodes by the weights that it has."""
        of_rows = row_log_probs(self.policy)
        return of_rows(self.state.params, batch, self.shape, *self.placed_base)

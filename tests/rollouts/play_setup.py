"""A small problem on which the tests check rollout, update and training step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape
from qrag_jax.environments.chunks import state_width
from qrag_jax.feedback.ground_truth import ground_truth
from qrag_jax.learners.deferred import ScoredGradient
from qrag_jax.learners.pqn import FusedGradient, PQNConfig, Sums, Towers
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.rollouts.chunks import Actor, Draws, RolloutConfig, Trajectory, rollout
from tests.episodes_maker import random_episodes, tiny_encoder, towers

SHAPE = EpisodeShape(question_tokens=6, chunk_tokens=8, chunks=6)
# More chunks than steps, fewer (2, 1), as many (3), and empty rows that fill up the batch (0).
CHUNK_COUNTS = (6, 2, 4, 0, 1, 3, 6, 0)
EPISODES = len(CHUNK_COUNTS)

ENCODER = tiny_encoder()
CONFIG = RolloutConfig(
    max_steps=3,
    never_terminate=True,
    sort_by_index=False,
    max_chunk_tokens=9,  # so that chunks of 8 tokens are cut to 7
    max_chunk_tokens_in_state=5,
    top_k_actions=3,
)
WIDTH = state_width(1, SHAPE.question_tokens, 5, CONFIG.max_steps - 1)
PLAN = BlockShapes(
    chunks=Blocks((18, 40), (6, 9), (4.0, 8.0)),
    states=Blocks((40,), (10, WIDTH), (8.0, 15.0)),
    gradients=Blocks((WIDTH, 50), (9, WIDTH), (8.0, 15.0)),
)
# For tests of other things than blocks: one bucket each compiles faster.
ONE_BUCKET = BlockShapes(
    Blocks((144,), (9,), (8.0,)), Blocks((80,), (WIDTH,), (12.0,)), Blocks((80,), (WIDTH,), (12.0,))
)
ACTOR = Actor(ENCODER, PLAN, CONFIG)
ONE_BUCKET_ACTOR = Actor(ENCODER, ONE_BUCKET, CONFIG)
PQN = PQNConfig(gamma=0.9, lambda_=0.6, tau=0.1, alpha=0.5, learning_start=10)
ALPHA = np.float32(0.5)


def unique_tokens(tokens: np.ndarray, lengths: np.ndarray) -> int:
    """Number of tokens of all different rows; tokens `[..., L]`, lengths `[...]` of all rows."""
    rows = zip(np.asarray(tokens).reshape(-1, tokens.shape[-1]), np.ravel(lengths), strict=True)
    return sum(map(len, {tuple(row[:length].tolist()) for row, length in rows}))


# Compiled here, so that tests in several files share the programs.
jitted_rollout = jax.jit(rollout, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def jitted_gradient(
    gradient: FusedGradient | ScoredGradient,
    towers: Towers,
    experience: Any,
    draws: Draws,
    dropout_key: jax.Array | None = None,
) -> tuple[Any, Sums]:
    """The result of `gradient`; equal gradient objects share a program."""
    return gradient(towers, experience, draws, dropout_key)


def episodes(seed: int = 0) -> EpisodeBatch:
    return random_episodes(seed, CHUNK_COUNTS, SHAPE)


def online() -> dict:
    return towers(ENCODER, 0)


def target() -> dict:
    return towers(ENCODER, 1)


def feedback(batch: EpisodeBatch, trajectory: Trajectory):
    """Ground truth with every option in use, so that rewards differ from step to step."""
    reward = partial(ground_truth, penalize_extra_steps=True, per_fact_reward=0.25)
    return reward(batch.support, trajectory.actions, trajectory.valid)

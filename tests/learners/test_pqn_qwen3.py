"""PQN with Qwen3 towers: rows that open with their text, and the gradient of the whole loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.ragged import TokenRows, embed_rows, pull_back
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, Trajectory
from tests.episodes_maker import tower, towers
from tests.learners.whole_loss import QWEN3, rows_of
from tests.rollouts.play_setup import (
    ALPHA,
    CONFIG,
    EPISODES,
    PLAN,
    episodes,
    jitted_rollout,
)

ENCODER = QWEN3
WIDE = PLAN._replace(
    states=PLAN.states._replace(tokens=(48,), lengths=(10, 24)),
    gradients=PLAN.gradients._replace(tokens=(30, 50), lengths=(9, 24)),
)
BATCH = episodes()
ACTOR = Actor(ENCODER, WIDE, CONFIG)
DRAWS = Draws(jax.random.split(jax.random.key(7), EPISODES), ALPHA)


@pytest.fixture(scope="module")
def played() -> Trajectory:
    params = towers(ENCODER, 0), towers(ENCODER, 1)
    trajectory = jitted_rollout(ACTOR, params, BATCH, DRAWS)
    return jax.tree.map(np.asarray, trajectory)


def test_rows_open_with_the_prefix_or_the_text(played) -> None:
    of_state, of_chunk, _ = rows_of(ENCODER, CONFIG, BATCH, played)
    for name, (tokens, lengths) in (("state", of_state), ("chunk", of_chunk)):
        found = getattr(played, f"{name}_tokens")[played.valid]
        np.testing.assert_array_equal(getattr(played, f"{name}_lengths")[played.valid], lengths)
        for one, other, length in zip(found, tokens, lengths, strict=True):
            np.testing.assert_array_equal(one[:length], other[:length])
        embedded = ENCODER.embed(
            jax.tree.map(lambda leaf, n=name: leaf[{"state": STATE, "chunk": CHUNK}[n]], online()),
            tokens,
            lengths,
        )
        of_rollout = getattr(played, f"{name}_embeddings")[played.valid]
        np.testing.assert_allclose(of_rollout, embedded, atol=2e-6)


def online() -> dict:
    return towers(ENCODER, 0)


def test_packed_rows_equal_padded_rows(played) -> None:
    params, (tokens, lengths) = tower(ENCODER, 5), rows_of(ENCODER, CONFIG, BATCH, played).states
    blocks, width = WIDE.gradients, WIDE.gradients.lengths[-1]
    tokens = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
    embedded, pull = jax.vjp(jax.jit(lambda p: ENCODER.embed(p, tokens, lengths)), params)
    packed, _ = jax.jit(embed_rows, static_argnums=(0, 1))(
        ENCODER, blocks, params, TokenRows(tokens, lengths)
    )
    np.testing.assert_allclose(packed, embedded, atol=2e-6)
    cotangents = np.random.default_rng(0).standard_normal(embedded.shape).astype(np.float32)
    found, _ = jax.jit(pull_back, static_argnums=(0, 1))(
        ENCODER, blocks, params, TokenRows(tokens, lengths), cotangents
    )
    (expected,) = pull(jnp.asarray(cotangents))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5 * float(jnp.abs(other).max()))

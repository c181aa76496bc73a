"""PQN with Qwen3 towers: rows that open with their text, and the gradient of the whole loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.learners.pqn import FusedGradient, Towers
from qrag_jax.models.compute.ragged import embed_rows, pull_back
from qrag_jax.models.heads.embedding import LAST, TextEncoder
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, Trajectory
from tests import reference
from tests.episodes_maker import POSITIONS, SEP, VOCAB, tower, towers
from tests.rollouts.play_setup import (
    ALPHA,
    CONFIG,
    EPISODES,
    PLAN,
    PQN,
    episodes,
    feedback,
    jitted_gradient,
    jitted_rollout,
)

PREFIX = (7, 8)  # of states; chunks open with their own text
ENCODER = TextEncoder(
    module=Qwen3(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=24,
            max_position_embeddings=POSITIONS,
        )
    ),
    width=16,
    max_positions=POSITIONS,
    opening_id=None,
    sep_id=SEP,
    pad_id=SEP,
    pooling=LAST,
    normalise=True,
    scale=1.5,
    state_prefix=PREFIX,
)
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


def rows(played: Trajectory) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Every state and chunk of the trajectory, made one token at a time."""
    states, chunks = [], []
    for b, t in zip(*np.nonzero(played.valid)):
        taken = played.actions[b].tolist()
        # As BERT's rows, without [CLS] and with the prefix.
        states.append([*PREFIX, *reference.state_row(BATCH, b, taken[:t], CONFIG)[1:]])
        most = CONFIG.max_chunk_tokens - 1
        chunks.append([*reference.chunk(BATCH, b, taken[t], most), SEP])
    width = max(map(len, states + chunks))
    return reference.padded(states, width), reference.padded(chunks, width)


def test_rows_open_with_the_prefix_or_the_text(played) -> None:
    of_state, of_chunk = rows(played)
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


def test_gradient_is_that_of_the_whole_loss(played) -> None:
    of_state, of_chunk = rows(played)
    goals = np.asarray(PQN.targets(played, feedback(BATCH, played)))[played.valid]

    def whole_loss(params):
        s = ENCODER.embed(jax.tree.map(lambda p: p[STATE], params), *of_state)
        a = ENCODER.embed(jax.tree.map(lambda p: p[CHUNK], params), *of_chunk)
        twin = (s * a).reshape(len(s), 2, -1).sum(-1)
        return 0.5 * ((2 * twin - goals[:, None]) ** 2).sum()

    expected_loss, expected = jax.jit(jax.value_and_grad(whole_loss))(online())
    both = Towers(online(), towers(ENCODER, 1))
    gradient, sums = jitted_gradient(FusedGradient(ACTOR, PQN, feedback), both, BATCH, DRAWS)
    assert float(sums.loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    norms = [float(optax.tree.norm(leaf)) for leaf in jax.tree.leaves(expected)]
    assert min(norms) > 1e-4 * max(norms)  # every parameter is reached
    difference = jax.tree.map(jnp.subtract, gradient, expected)
    for leaf, norm in zip(jax.tree.leaves(difference), norms, strict=True):
        assert float(optax.tree.norm(leaf)) < 2e-5 * max(norms), norm
    assert float(optax.tree.norm(difference)) < 2e-5 * float(optax.tree.norm(expected))


def test_packed_rows_equal_padded_rows(played) -> None:
    params, (tokens, lengths) = tower(ENCODER, 5), rows(played)[0]
    blocks, width = WIDE.gradients, WIDE.gradients.lengths[-1]
    tokens = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
    embedded, pull = jax.vjp(jax.jit(lambda p: ENCODER.embed(p, tokens, lengths)), params)
    packed, _ = jax.jit(embed_rows, static_argnums=(0, 1))(ENCODER, blocks, params, tokens, lengths)
    np.testing.assert_allclose(packed, embedded, atol=2e-6)
    cotangents = np.random.default_rng(0).standard_normal(embedded.shape).astype(np.float32)
    found, _ = jax.jit(pull_back, static_argnums=(0, 1))(
        ENCODER, blocks, params, tokens, lengths, cotangents
    )
    (expected,) = pull(jnp.asarray(cotangents))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5 * float(jnp.abs(other).max()))

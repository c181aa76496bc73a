"""PQN where the towers themselves drop: the loss that was played, targets by masks of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from qrag_jax.learners.deferred import ScoredGradient
from qrag_jax.learners.pqn import FusedGradient, Sums, Towers
from qrag_jax.learners.step import make_train_step
from qrag_jax.models.compute.dropout import (
    TokenDropout,
    row_digests,
    token_digests,
    trunk_keys,
    with_key,
)
from qrag_jax.models.compute.packing import padded_layout
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.trunks.trunk import WORDS
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.runtime.mesh import AXES, shard_batch
from tests.episodes_maker import tower
from tests.learners.deferred_plays import at_the_end, per_step
from tests.learners.three_steps import two_towers
from tests.rollouts.play_setup import (
    ALPHA,
    CONFIG,
    ENCODER,
    EPISODES,
    ONE_BUCKET,
    PQN,
    episodes,
    jitted_gradient,
    jitted_rollout,
    online,
    target,
)

SHARES = {"dropout": 0.2, "attention_dropout": 0.3}
DROPPING = TextEncoder(**(vars(ENCODER) | SHARES))
KEY = jax.random.key(3)
OF_ONLINE, OF_TARGET = jax.random.split(KEY, (2, 2))  # each: of the state and the chunk tower
DRAWS = Draws(jax.random.split(jax.random.key(7), EPISODES), ALPHA)
BATCH = episodes()
ACTOR = Actor(DROPPING, ONE_BUCKET, CONFIG)


def embed(params: Any, key: jax.Array, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
    """Rows padded side by side, each with its masks: nothing packed, no row left out."""
    where, width = padded_layout(lengths, tokens.shape[1]), tokens.shape[1]
    digests = jnp.repeat(row_digests(jnp.asarray(tokens), jnp.asarray(lengths)), width)
    dropout = TokenDropout(
        token_digests(digests, where.position),
        keys=trunk_keys(key, DROPPING.module.config.num_hidden_layers),
        hidden=SHARES["dropout"],
        attention=SHARES["attention_dropout"],
    )
    prepared = DROPPING.module.unstack(params)
    words = prepared[WORDS][tokens.reshape(-1)]
    return DROPPING.embed_words(prepared, words, where._replace(dropout=dropout))


@pytest.fixture(scope="module")
def played() -> Any:
    """Episodes as towers play them whose masks were drawn by the keys above."""
    sides = with_key(online(), OF_ONLINE), with_key(target(), OF_TARGET)
    found = jitted_rollout(ACTOR, sides, BATCH, DRAWS)
    return jax.tree.map(np.asarray, found)


@pytest.fixture(scope="module")
def fused() -> tuple[Any, Sums]:
    """The gradient and sums of a whole step's play and update."""
    gradient = FusedGradient(ACTOR, PQN, at_the_end)
    return jitted_gradient(gradient, Towers(online(), target()), BATCH, DRAWS, KEY)


def assert_gradients_equal(found: Any, expected: Any) -> None:
    largest = max(float(optax.tree.norm(leaf)) for leaf in jax.tree.leaves(expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(optax.tree.norm(one - two)) < 2e-5 * largest


def test_gradient_is_that_of_the_loss_that_was_played(played, fused) -> None:
    goals = np.asarray(PQN.targets(played, at_the_end(BATCH, played))).reshape(-1)
    valid = played.valid.reshape(-1)

    def rows(of: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = getattr(played, f"{of}_tokens").reshape(len(valid), -1)
        return tokens, getattr(played, f"{of}_lengths").reshape(-1)

    def whole_loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        both = tuple(
            embed(DROPPING.tower(params, number), OF_ONLINE[number], *rows(of))
            for number, of in ((STATE, "state"), (CHUNK, "chunk"))
        )
        twin = (both[0] * both[1]).reshape(len(valid), 2, -1).sum(-1)
        return (valid[:, None] * 0.5 * (2 * twin - goals[:, None]) ** 2).sum(), both

    (loss, both), expected = jax.jit(jax.value_and_grad(whole_loss, has_aux=True))(online())
    for found, of in zip(both, ("state", "chunk"), strict=True):  # these are what was acted on
        acted_on = getattr(played, f"{of}_embeddings").reshape(len(valid), -1)
        np.testing.assert_allclose(found[valid], acted_on[valid], atol=1e-5)
    gradient, sums = fused
    assert float(sums.loss) == pytest.approx(float(loss), rel=1e-5)
    assert_gradients_equal(gradient, expected)


def test_targets_drop_by_masks_of_their_own(played) -> None:
    dropped = with_key(online(), OF_ONLINE)
    others = {
        "no masks": target(),
        "the online towers' masks": with_key(target(), OF_ONLINE),
    }
    for name, side in others.items():
        values = jitted_rollout(ACTOR, (dropped, side), BATCH, DRAWS).values
        assert np.abs(values[:, 0] - played.values[:, 0])[played.valid[:, 0]].max() > 1e-2, name
    plain = jitted_rollout(ACTOR, (online(), target()), BATCH, DRAWS)
    assert np.abs(plain.first_q - played.first_q)[BATCH.chunk_mask].max() > 1e-2


def test_learning_later_is_the_fused_step_at_no_lag(played, fused) -> None:
    steps = Played(*map(np.asarray, (played.actions, played.valid, played.entropy)))
    scored = ScoredEpisodes(BATCH, steps, *per_step(steps, np.ones(EPISODES, bool)))
    learn = ScoredGradient(ACTOR, PQN)
    found, sums = jitted_gradient(learn, Towers(online(), target()), scored, DRAWS, KEY)
    gradient, expected = fused
    assert_gradients_equal(found, gradient)
    for name in ("loss", "q", "target", "td_error", "entropy", "reward"):
        assert float(getattr(sums, name)) == pytest.approx(
            float(getattr(expected, name)), rel=1e-4
        ), name


def test_a_training_step_drops_where_the_encoder_does() -> None:
    mesh, one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES), tower(ENCODER, 0)
    state = two_towers(mesh, one).first_state(one, 42)

    def program(encoder: TextEncoder) -> str:
        towers = two_towers(mesh, one, Actor(encoder, ONE_BUCKET, CONFIG))
        step: Any = make_train_step(towers, at_the_end)
        return step.lower(state, shard_batch(mesh, BATCH)).as_text()

    of_masks = str(0x7FEB352D)  # a constant of the hash that draws them
    assert of_masks in program(DROPPING)
    assert of_masks not in program(ENCODER)

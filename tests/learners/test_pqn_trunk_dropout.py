"""PQN where the towers themselves drop: the loss that was played, targets by masks of their own."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from qrag_jax.learners.deferred import ScoredGradient
from qrag_jax.learners.pqn import FusedGradient, Sums, Towers
from qrag_jax.learners.step import make_train_step
from qrag_jax.models.compute.dropout import (
    with_key,
)
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import Actor, Draws
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.runtime.mesh import shard_batch
from tests.devices import mesh_of
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
    mesh, one = mesh_of(), tower(ENCODER, 0)
    state = two_towers(mesh, one).first_state(one, 42)

    def program(encoder: TextEncoder) -> str:
        towers = two_towers(mesh, one, Actor(encoder, ONE_BUCKET, CONFIG))
        step: Any = make_train_step(towers, at_the_end)
        return step.lower(state, shard_batch(mesh, BATCH)).as_text()

    of_masks = str(0x7FEB352D)  # a constant of the hash that draws them
    assert of_masks in program(DROPPING)
    assert of_masks not in program(ENCODER)

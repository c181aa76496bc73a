"""PQN with dropout: play and learning see the same masks, however a step is split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import Actor, Draws
from tests.episodes_maker import tower
from tests.learners.dropout_steps import ran
from tests.learners.whole_loss import ADAPTED, adapters
from tests.rollouts.play_setup import (
    ALPHA,
    CONFIG,
    EPISODES,
    PLAN,
    episodes,
    jitted_rollout,
)

pytestmark = pytest.mark.long

RATE = 0.4
KEY = jax.random.key(3)
KEYS = jax.random.split(jax.random.key(7), EPISODES)
BATCH = episodes()
ENCODER = TextEncoder(**(vars(ADAPTED["bert"]) | {"lora_dropout": RATE}))


def test_the_acting_policy_drops_and_the_targets_do_not() -> None:
    base, online = jax.tree.map(jnp.asarray, tower(ENCODER, 0)), adapters("bert", 0)
    params, target = Adapted(base, online), Adapted(base, adapters("bert", 1))
    actor, draws = Actor(ENCODER, PLAN, CONFIG), Draws(KEYS, ALPHA)
    keyed = params._replace(dropout_key=jax.random.split(KEY, 2))
    played = jitted_rollout(actor, (keyed, target), BATCH, draws)
    plain = jitted_rollout(actor, (params, target), BATCH, draws)
    present = BATCH.chunk_mask
    assert np.abs(plain.first_q - played.first_q)[present].max() > 1e-2
    np.testing.assert_allclose(plain.values[:, 0], played.values[:, 0], atol=1e-5)


@pytest.mark.parametrize(
    "of",
    [pytest.param("", id="adapters"), pytest.param("trunk ", id="trunk", marks=pytest.mark.slow)],
)
def test_devices_and_micro_batches_see_the_same_masks(of: str) -> None:
    whole, split = ran(f"{of}whole"), ran(f"{of}split")
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        if "padding_share" not in name:  # of smaller batches
            np.testing.assert_allclose(split[name], value, rtol=2e-4, atol=1e-5, err_msg=name)


def test_a_step_drops() -> None:
    for number in range(3):
        losses = [ran(name)[f"['metrics {number}']['loss']"] for name in ("whole", "undropped")]
        assert abs(losses[0] - losses[1]) > 1e-3

"""Episodes seen again equal those that were played."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from qrag_jax.environments.chunks import with_stop
from qrag_jax.rollouts.chunks import Actor, Draws
from qrag_jax.rollouts.replay import replay
from tests.rollouts.play_setup import (
    ALPHA,
    CONFIG,
    ENCODER,
    EPISODES,
    ONE_BUCKET,
    episodes,
    jitted_rollout,
    target,
)

KEYS = jax.random.split(jax.random.key(5), EPISODES)
jitted_replay = jax.jit(replay, static_argnums=0)
SAME = (
    *("valid", "done", "state_tokens", "state_lengths", "chunk_tokens", "chunk_lengths"),
    "positions",
)


@pytest.mark.parametrize(
    "changes",
    [
        {"never_terminate": False, "sort_by_index": True, "positions": "relative"},
        pytest.param({"stop_action": True, "positions": "random"}, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_trajectory_that_was_played(changes: dict) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    batch = with_stop(episodes()) if config.stop_action else episodes()
    actor, draws = Actor(ENCODER, ONE_BUCKET, config), Draws(KEYS, ALPHA)
    played = jitted_rollout(actor, (target(),), batch, draws)
    found = jitted_replay(actor, target(), batch, draws, played.actions)
    valid = np.asarray(played.valid)
    assert valid[:, 1:].any()
    for name in SAME:
        one, other = (np.asarray(getattr(each, name)) for each in (found, played))
        if name in ("state_tokens", "chunk_tokens", "positions"):  # else nothing is looked at
            one, other = one[valid], other[valid]
        np.testing.assert_array_equal(one, other, err_msg=name)
    later = valid & (np.arange(valid.shape[1]) > 0)
    values = np.asarray(played.values)
    np.testing.assert_allclose(np.asarray(found.values)[later], values[later], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found.values)[~later], 0)

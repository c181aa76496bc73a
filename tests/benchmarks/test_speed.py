"""The suite speed: our figure and the peer's are of the same tensors, weights and work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.algorithms.two_towers import alpha_at
from qrag_jax.feedback.facts import FactReward
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.trunks.families import BERT_TABLE
from qrag_jax.rollouts.chunks import CHUNK, STATE, Draws
from qrag_jax.runtime.mesh import replicate, shard_batch
from tests.devices import mesh_of
from tests.episodes_maker import tower
from tests.learners import updates
from tests.rollouts.play_setup import ENCODER, ONE_BUCKET_ACTOR, episodes, jitted_rollout, online
from tests.support.torch_pqn import BatchedPeer, tower_params

STEPS = 2  # the first update of Adam alone would hide a wrong scale of the gradient
STOPPING = dataclasses.replace(ONE_BUCKET_ACTOR.config, never_terminate=False, sort_by_index=True)


def by_name(params: Any) -> dict[str, np.ndarray]:
    """Both towers' weights under Hugging Face's names."""
    return {
        f"{name} {key}": value
        for name, place in (("state", STATE), ("chunk", CHUNK))
        for key, value in tensors_from_params(BERT_TABLE, tower_params(params, place)).items()
    }


def test_updates_of_the_peer_equal_ours() -> None:
    """Of the episodes some end early, others run on to their last step."""
    actor = dataclasses.replace(ONE_BUCKET_ACTOR, config=STOPPING)
    towers = updates.two_towers(updates.ALONE, tower(ENCODER, 0), actor, config=updates.ACTS)
    step, pqn, optimizer = updates.fused_update(towers), updates.ACTS, updates.OPTIMIZER_CONFIG
    state = replicate(mesh_of(), towers.parts.build(online(), jax.random.key(3)))
    reward = FactReward(penalize_extra_steps=True, per_fact_reward=0.25)  # as play_setup.feedback
    peer = BatchedPeer(ENCODER, online(), STOPPING, pqn, optimizer, reward)
    before = 0.0
    for number in range(STEPS):
        batch = episodes(number)
        keys = jax.random.split(jax.random.fold_in(state.key, state.step), len(batch.sample))
        alpha = alpha_at(pqn.alpha, updates.SCHEDULE(number), updates.PEAK)
        roles, draws = (state.params, state.target_params), Draws(keys, alpha, False)
        actions = np.asarray(jitted_rollout(actor, roles, batch, draws).actions)
        state, metrics = step(state, shard_batch(towers.mesh, batch))
        assert metrics["grad_norm"] > optimizer.clip_norm  # every update is clipped
        found = peer.step(batch, actions)
        assert found.transitions == metrics["env_steps"] - before
        assert found.loss == pytest.approx(float(metrics["loss"]), rel=1e-5)
        assert found.grad_norm == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)
        before = metrics["env_steps"]
    start = by_name(online())
    for pair, params in ((peer.online, state.params), (peer.target, state.target_params)):
        of_towers = ("state", pair.state), ("chunk", pair.chunk)
        found = {f"{n} {key}": x for n, one in of_towers for key, x in one.tensors().items()}
        weights = by_name(params)
        assert set(found) == set(weights)
        for key, value in weights.items():
            np.testing.assert_allclose(found[key], value, atol=1e-5, err_msg=key)
        assert max(np.abs(weights[key] - start[key]).max() for key in weights) > 1e-4

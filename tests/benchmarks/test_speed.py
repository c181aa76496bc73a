"""The suite speed: our figure and the peer's are of the same tensors, weights and work."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.algorithms.two_towers import alpha_at
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.state import Parts
from qrag_jax.learners.two_towers import PQNGradient, TwoTowers, make_update
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.trunks.families import BERT_TABLE
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, RolloutConfig
from qrag_jax.runtime.mesh import replicate, shard_batch
from tests.devices import mesh_of
from tests.episodes_maker import tiny_encoder, tower, towers
from tests.rollouts.play_setup import CONFIG, ONE_BUCKET, PQN, episodes, feedback, jitted_rollout
from tests.support.torch_pqn import BatchedPeer, Settings, tower_params

# ------------------------------------------------------------------------------ Q-RAG

ENCODER = tiny_encoder(layers=2, hidden=32)
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3,
    weight_decay=0.01,
    beta1=0.9,
    beta2=0.98,
    eps=1e-6,
    clip_norm=0.1,  # below the norms found here, so that every update is clipped
    schedule="linear",
    final_ratio=0.0,
    warmup_steps=2,
    total_steps=10,
)
SCHEDULE = learning_rate_schedule(OPTIMIZER)
STEPS = 2  # the first update of Adam alone would hide a wrong scale of the gradient
STOPPING = dataclasses.replace(CONFIG, never_terminate=False, sort_by_index=True)
EXPLOITING = dataclasses.replace(PQN, learning_start=0)


def peer_of(config: RolloutConfig, *, sort: bool = False) -> BatchedPeer:
    settings = Settings(
        encoder=ENCODER,
        rollout=config,
        pqn=EXPLOITING,
        optimizer=OPTIMIZER,
        learning_rates=tuple(float(SCHEDULE(i)) for i in range(STEPS)),
        penalize_extra_steps=True,  # as play_setup.feedback has it
        per_fact_reward=0.25,
    )
    return BatchedPeer(settings, towers(ENCODER, 0), sort=sort)


def by_name(params: Any) -> dict[str, np.ndarray]:
    """Both towers' weights under Hugging Face's names."""
    return {
        f"{name} {key}": value
        for name, place in (("state", STATE), ("chunk", CHUNK))
        for key, value in tensors_from_params(BERT_TABLE, tower_params(params, place)).items()
    }


@cache
def ours() -> tuple[list[np.ndarray], list[dict[str, float]], Any]:
    """Steps of the package's own program: the actions that PQN drew, the metrics, the state."""
    mesh, parts = mesh_of(), Parts(make_optimizer(OPTIMIZER), has_targets=True)
    state = replicate(mesh, parts.build(towers(ENCODER, 0), jax.random.key(3)))
    actor = Actor(ENCODER, ONE_BUCKET, STOPPING)
    two_towers = TwoTowers(
        mesh=mesh,
        shardings=parts.shardings(mesh, (), tower(ENCODER, 0)),
        parts=parts,
        actor=actor,
        config=EXPLOITING,
        schedule=SCHEDULE,
        peak=OPTIMIZER.learning_rate,
    )
    step = make_update(two_towers, PQNGradient(two_towers.actor, EXPLOITING, feedback))
    actions, metrics = [], []
    for number in range(STEPS):
        batch = episodes(number)
        keys = jax.random.split(jax.random.fold_in(state.key, state.step), len(batch.sample))
        alpha = alpha_at(EXPLOITING.alpha, SCHEDULE(number), OPTIMIZER.learning_rate)
        roles, draws = (state.params, state.target_params), Draws(keys, alpha, False)
        actions.append(np.asarray(jitted_rollout(actor, roles, batch, draws).actions))
        state, found = step(state, shard_batch(mesh, batch))
        metrics.append({name: float(value) for name, value in found.items()})
    return actions, metrics, (by_name(state.params), by_name(state.target_params))


@pytest.mark.parametrize("sort", [False, True], ids=["padded", "length-sorted"])
def test_updates_equal_ours(sort: bool) -> None:
    """Of the episodes some end early, others run on to their last step."""
    actions, expected, learned = ours()
    assert min(metrics["grad_norm"] for metrics in expected) > OPTIMIZER.clip_norm
    peer, before = peer_of(STOPPING, sort=sort), 0.0
    for number, metrics in enumerate(expected):
        result = peer.step(episodes(number), actions[number])
        assert result.transitions == metrics["env_steps"] - before
        assert result.loss == pytest.approx(metrics["loss"], rel=1e-5)
        assert result.grad_norm == pytest.approx(metrics["grad_norm"], rel=1e-4)
        before = metrics["env_steps"]
    start = by_name(towers(ENCODER, 0))
    for pair, weights in zip((peer.online, peer.target), learned, strict=True):
        of_towers = ("state", pair.state), ("chunk", pair.chunk)
        found = {f"{n} {key}": x for n, one in of_towers for key, x in one.tensors().items()}
        assert set(found) == set(weights)
        for key, value in weights.items():
            np.testing.assert_allclose(found[key], value, atol=1e-5, err_msg=key)
        assert max(np.abs(weights[key] - start[key]).max() for key in weights) > 1e-4

"""The PyTorch peers compute what the package computes: losses, parameters, greedy choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from benchmarks.peers.sequential import SequentialPeer
from benchmarks.peers.towers import Tower, pad_rows, tower_params

from qrag_jax.algorithms.pqn import alpha_at
from qrag_jax.errors import InputError
from qrag_jax.evaluators.episodes import Played, Player, make_play
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.placement import params_shardings, state_shardings
from qrag_jax.learners.state import init_state
from qrag_jax.learners.step import make_train_step
from qrag_jax.learners.two_towers import TwoTowers
from qrag_jax.models.trunks.bert_weights import tensors_from_params
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, RolloutConfig
from qrag_jax.runtime.mesh import replicate, shard_batch
from tests.devices import mesh_of
from tests.episodes_maker import tiny_encoder, tower, towers
from tests.rollouts.play_setup import (
    CONFIG,
    ONE_BUCKET,
    PQN,
    episodes,
    feedback,
    jitted_rollout,
)
from tests.support.torch_pqn import BatchedPeer, Learner, Settings

ENCODER = tiny_encoder(layers=2, hidden=32)
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3,
    weight_decay=0.01,
    beta1=0.9,
    beta2=0.98,
    eps=1e-6,
    clip_norm=0.5,  # below the norms found here, so that every update is clipped
    schedule="linear",
    final_ratio=0.0,
    warmup_steps=2,
    total_steps=10,
)
SCHEDULE = learning_rate_schedule(OPTIMIZER)
STEPS = 2  # the first update of Adam alone would hide a wrong scale of the gradient
STOPPING = dataclasses.replace(CONFIG, never_terminate=False, sort_by_index=True)
EXPLOITING = dataclasses.replace(PQN, learning_start=0)

PEERS: dict[str, Callable[..., Any]] = {
    "torch": BatchedPeer,
    "torch, length-sorted": lambda *args: BatchedPeer(*args, sort=True),
    "torch-sequential": SequentialPeer,
}


def settings(config: RolloutConfig) -> Settings:
    return Settings(
        encoder=ENCODER,
        rollout=config,
        pqn=EXPLOITING,
        optimizer=OPTIMIZER,
        learning_rates=tuple(float(SCHEDULE(i)) for i in range(STEPS)),
        penalize_extra_steps=True,  # as play_setup.feedback has it
        per_fact_reward=0.25,
    )


@dataclasses.dataclass
class Ours:
    actions: list[np.ndarray]
    losses: list[float]
    norms: list[float]
    transitions: list[int]
    params: dict[str, np.ndarray]
    target_params: dict[str, np.ndarray]


def by_name(params) -> dict[str, np.ndarray]:
    """Both towers' weights under Hugging Face's names."""
    result: dict[str, np.ndarray] = {}
    for name, place in (("state", STATE), ("chunk", CHUNK)):
        tensors = tensors_from_params(tower_params(params, place))
        result |= {f"{name} {key}": value for key, value in tensors.items()}
    return result


@cache
def ours(config: RolloutConfig) -> Ours:
    """Steps of the package's own program, with the actions that it drew."""
    mesh = mesh_of()
    optimizer = make_optimizer(OPTIMIZER)
    state = replicate(mesh, init_state(towers(ENCODER, 0), optimizer, jax.random.key(3)))
    actor = Actor(ENCODER, ONE_BUCKET, config)
    two_towers = TwoTowers(
        mesh=mesh,
        shardings=state_shardings(mesh, (), tower(ENCODER, 0), optimizer),
        actor=actor,
        config=EXPLOITING,
        optimizer=optimizer,
        schedule=SCHEDULE,
        peak=OPTIMIZER.learning_rate,
    )
    train_step = make_train_step(two_towers, feedback)
    result = Ours([], [], [], [], {}, {})
    for number in range(STEPS):
        batch = episodes(number)
        keys = jax.random.split(jax.random.fold_in(state.key, state.step), len(batch.sample))
        alpha = alpha_at(EXPLOITING.alpha, SCHEDULE(number), OPTIMIZER.learning_rate)
        roles = state.params, state.target_params
        played = jitted_rollout(actor, roles, batch, Draws(keys, alpha, False))
        result.actions.append(np.asarray(played.actions))
        result.transitions.append(int(played.valid.sum()))
        state, metrics = train_step(state, shard_batch(mesh, batch))
        result.losses.append(float(metrics["loss"]))
        result.norms.append(float(metrics["grad_norm"]))
    result.params, result.target_params = map(by_name, (state.params, state.target_params))
    return result


def peer_weights(peer: Learner, role: str) -> dict[str, np.ndarray]:
    pair = getattr(peer, role)
    return {
        f"{name} {key}": value
        for name, tower in (("state", pair.state), ("chunk", pair.chunk))
        for key, value in tower.tensors().items()
    }


@pytest.mark.parametrize("name", PEERS)
def test_updates_equal_ours(name: str) -> None:
    config = STOPPING  # some episodes end early, some run on to their last step
    expected = ours(config)
    assert min(expected.norms) > OPTIMIZER.clip_norm
    peer = PEERS[name](settings(config), towers(ENCODER, 0))
    for number in range(STEPS):
        result = peer.step(episodes(number), expected.actions[number])
        assert result.transitions == expected.transitions[number]
        assert result.loss == pytest.approx(expected.losses[number], rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.norms[number], rel=1e-4)
    start = by_name(towers(ENCODER, 0))
    for role, weights in (("online", expected.params), ("target", expected.target_params)):
        found = peer_weights(peer.learner, role)
        assert set(found) == set(weights)
        moved = 0.0
        for key, value in weights.items():
            np.testing.assert_allclose(found[key], value, atol=1e-5, err_msg=f"{role} {key}")
            moved = max(moved, float(np.abs(value - start[key]).max()))
        assert moved > 1e-4


@cache
def greedy(config: RolloutConfig) -> Played:
    mesh = mesh_of()
    replicated = params_shardings(mesh, (), tower(ENCODER, 0))
    player = Player(mesh, replicated, ENCODER, config, feedback, PQN.gamma)
    play = make_play(player, ONE_BUCKET)
    return play(replicate(mesh, towers(ENCODER, 0)), shard_batch(mesh, episodes(5))).multi_step


@pytest.mark.parametrize("name", PEERS)
def test_greedy_episodes_take_the_same_chunks(name: str) -> None:
    expected = greedy(CONFIG)
    actions, valid = PEERS[name](settings(CONFIG), towers(ENCODER, 0)).play(episodes(5))
    np.testing.assert_array_equal(valid, expected.valid)
    taken = np.asarray(expected.taken)[valid]
    np.testing.assert_array_equal(actions[valid], taken)
    assert len(set(taken.tolist())) > 2


@pytest.mark.parametrize("kind", ["absolute", "relative"])
def test_the_sequential_peer_takes_the_same_chunks_at_positions(kind: str) -> None:
    config = dataclasses.replace(CONFIG, positions=kind, sort_by_index=True)
    expected = greedy(config)
    actions, valid = SequentialPeer(settings(config), towers(ENCODER, 0)).play(episodes(5))
    np.testing.assert_array_equal(valid, expected.valid)
    np.testing.assert_array_equal(actions[valid], np.asarray(expected.taken)[valid])
    assert (actions != greedy(CONFIG).taken)[valid].any()


@pytest.mark.parametrize("name", PEERS)
def test_settings_that_a_peer_does_not_compute_are_refused(name: str) -> None:
    def make(**changes: Any) -> Any:
        config = dataclasses.replace(CONFIG, **changes)
        return PEERS[name](settings(config), towers(ENCODER, 0))

    with pytest.raises(InputError, match=r"config\.env\.stop_action .* turn it off\."):
        make(stop_action=True)
    with pytest.raises(InputError, match=r"config\.env\.positions is 'random_published', .* none"):
        make(positions="random_published")
    with pytest.raises(InputError, match=r"config\.env\.positions is 'relative', .* use none\."):
        make(positions="relative").step(episodes(5))


@pytest.mark.parametrize("name", PEERS)
def test_peers_draw_among_the_best_available(name: str) -> None:
    config = dataclasses.replace(CONFIG, top_k_actions=1)
    one, two = (PEERS[name](settings(config), towers(ENCODER, 0)) for _ in range(2))
    batch = episodes(1)
    # With one action to draw from, the policy is the greedy one.
    free, forced = one.step(batch), two.step(batch, two.play(batch)[0])
    assert free.loss == pytest.approx(forced.loss, rel=1e-6)


def test_counter_tells_text_from_padding() -> None:
    batch = episodes(0)
    shares = {}
    for name, make in PEERS.items():
        peer = make(settings(CONFIG), towers(ENCODER, 0))
        counter = peer.learner.count_tokens()
        peer.play(batch)
        chunks = np.minimum(batch.chunk_lengths, CONFIG.max_chunk_tokens - 2) + 2
        least = chunks[batch.chunk_mask].sum()
        assert least < counter.text < counter.computed
        shares[name] = counter.padding_share
    assert shares["torch"] < shares["torch-sequential"]


def test_tower_embeds_as_ours() -> None:
    params = tower_params(towers(ENCODER, 0), STATE)
    tower = Tower(ENCODER, params, torch.device("cpu"))
    rows = pad_rows([[2, 7, 8, 3], [2, 3], [2, *range(5, 15), 3]], 16, 0, torch.device("cpu"))
    found = tower(rows).detach().numpy()
    expected = ENCODER.embed(params, *map(jnp.asarray, (rows.tokens, rows.lengths)))
    np.testing.assert_allclose(found, expected, atol=1e-5)

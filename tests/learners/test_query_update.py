"""Updates of a query encoder against the gradient of the whole loss by its definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.learners.policy_config import GRPOConfig, PPOConfig
from qrag_jax.learners.policy_state import Critic
from qrag_jax.learners.query_update import minibatch_order
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.trunks.bert_weights import PARTITION_RULES
from qrag_jax.rollouts.hop_batch import HopBatch, Rewarded, hop_batch
from tests.devices import mesh_of
from tests.episodes_maker import tower
from tests.learners.hop_updates import (
    ENCODER,
    POLICY,
    RATE,
    SHAPE,
    WEIGHTS,
    Learning,
    batch,
    embedded,
    episodes,
    log_probs,
)
from tests.learners.whole_loss import adapters

MEMBERS = 4
TOWER = tower(ENCODER, 0)


def normal(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=1) + 1e-4)


def advantages(given: HopBatch) -> np.ndarray:
    """GRPO's, group by group, in float64; NaN where nothing is learned."""
    found = np.full(given.lengths.shape, np.nan)
    for start in range(0, len(given.scored), MEMBERS):
        members = [n for n in range(start, start + MEMBERS) if given.scored[n]]
        hops = [(n, t) for n in members for t in range(SHAPE.hops) if given.lengths[n, t]]
        of_episode = dict(zip(members, normal(np.float64(given.episode_rewards[members, 0]))))
        of_hop = normal(np.array([given.hop_rewards[n, t, 0] for n, t in hops], np.float64))
        by_hop = dict(zip(hops, of_hop))
        for n, t in hops:
            to_go = sum(value for (m, s), value in by_hop.items() if m == n and s >= t)
            found[n, t] = WEIGHTS[0][0] * of_episode[n] + WEIGHTS[1][0] * to_go
    return found


def grpo_loss(params: Params, given: HopBatch, config: GRPOConfig, old: np.ndarray | None) -> Any:
    """Eq. 12 of HARR: the mean over searches of each episode, then over episodes."""
    worth, total, count = advantages(given), jnp.zeros(()), 0
    new = log_probs(params, given)
    first = log_probs(TOWER, given)
    for n in range(len(given.scored)):
        hops = [t for t in range(SHAPE.hops) if not np.isnan(worth[n, t])]
        if not hops:
            continue
        count += 1
        for t in hops:
            before = jax.lax.stop_gradient(new[n, t]) if old is None else old[n, t]
            ratio, gain = jnp.exp(new[n, t] - before), worth[n, t].astype(np.float32)
            bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
            away = first[n, t] - new[n, t]
            kl = jnp.exp(away) - away - 1
            loss = config.beta * kl - jnp.minimum(ratio * gain, bounded * gain)
            total += loss / len(hops)
    return total / count


def check_moved(state: Params, start: Params, gradient: Params) -> None:
    """Plain descent: what moved is the rate times the gradient."""
    moved = jax.tree.map(lambda after, before: (before - np.asarray(after)) / RATE, state, start)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    for found, expected in zip(*map(jax.tree.leaves, (moved, gradient)), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1.0, largest))
    assert largest > 1e-3


def grpo(**fields: Any) -> GRPOConfig:
    return GRPOConfig(members=MEMBERS, **fields)


def test_grpo_on_the_weights_that_acted() -> None:
    given = batch()
    learning = Learning(mesh_of(), TOWER, grpo())
    metrics = learning.step(given)
    loss, gradient = jax.value_and_grad(grpo_loss)(TOWER, given, grpo(), None)
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert metrics["largest_ratio"] == 1.0  # exactly
    assert metrics["clip_fraction"] == 0.0
    check_moved(learning.state.params, TOWER, gradient)
    assert int(learning.state.step) == 1
    valid = (given.lengths > 0) & given.scored[:, None]
    assert int(learning.state.env_steps) == valid.sum()
    gap = np.abs(np.asarray(log_probs(TOWER, given)) - given.log_probs)[valid].mean()
    assert metrics["replay_gap"] == pytest.approx(gap, abs=1e-5)
    rewards = (
        0.8 * given.episode_rewards[given.scored, 0].sum() + 0.5 * given.hop_rewards[valid].sum()
    )
    assert metrics["return"] == pytest.approx(rewards / given.scored.sum(), abs=1e-5)


def test_grpo_on_older_weights_with_a_kl() -> None:
    """As with K = 1: ratios are to the stored log-probabilities, and some are clipped."""
    given, config = batch(), grpo(beta=0.3, clip_low=0.05, clip_high=0.1)
    learning = Learning(mesh_of(), TOWER, config, is_fresh=False, keeps_reference=True)
    first = learning.step(given)
    _, gradient = jax.value_and_grad(grpo_loss)(TOWER, given, config, given.log_probs)
    check_moved(learning.state.params, TOWER, gradient)
    assert first["clip_fraction"] > 0
    assert first["largest_ratio"] > 1.1
    before = jax.tree.map(np.asarray, learning.state.params)
    learning.step(given)  # now the weights are not the reference any more
    gradient = jax.grad(grpo_loss)(before, given, config, given.log_probs)
    check_moved(learning.state.params, before, gradient)


def test_ppo_and_its_critic() -> None:
    given, config = batch(), PPOConfig(kl=0.0, gamma=0.9, lambda_=0.8)
    learning = Learning(mesh_of(), TOWER, config)
    learning.state = learning.state._replace(
        critic=Critic(learning.state.critic.tower, *_head())  # else all values are 0
    )
    metrics = learning.step(given)
    valid = np.asarray((given.lengths > 0) & given.scored[:, None])
    weights, bias = _head()
    values = np.asarray(embedded(TOWER, given) @ weights + bias)
    gains, returns = np.zeros(valid.shape), np.zeros(valid.shape)
    for n in range(len(valid)):
        after, advantage = 0.0, 0.0
        for t in reversed(np.flatnonzero(valid[n])):
            reward = 0.5 * given.hop_rewards[n, t, 0]
            if t == valid[n].sum() - 1:
                reward += 0.8 * given.episode_rewards[n, 0]
            error = reward + 0.9 * after - values[n, t]
            advantage = error + 0.9 * 0.8 * advantage
            after = values[n, t]
            gains[n, t], returns[n, t] = advantage, advantage + values[n, t]
    white = (gains - gains[valid].mean()) / gains[valid].std(ddof=1)

    def policy_loss(params: Params) -> jax.Array:
        new = log_probs(params, given)
        ratio = jnp.exp(new - jax.lax.stop_gradient(new))
        return -jnp.where(valid, ratio * white.astype(np.float32), 0.0).sum() / valid.sum()

    def value_loss(critic: Critic) -> jax.Array:
        found = embedded(critic.tower, given) @ critic.weights + critic.bias
        error = jnp.square(found - returns.astype(np.float32))
        return 0.5 * jnp.where(valid, error, 0.0).sum() / valid.sum()

    check_moved(learning.state.params, TOWER, jax.grad(policy_loss)(TOWER))
    start = Critic(TOWER, weights, bias)
    loss, gradient = jax.value_and_grad(value_loss)(start)
    check_moved(learning.state.critic, start, gradient)
    assert metrics["value_loss"] == pytest.approx(float(loss), abs=1e-5)
    spread = np.square(returns - returns[valid].mean())[valid].sum()
    left = np.square(gains)[valid].sum()
    assert metrics["explained_variance"] == pytest.approx(1 - left / spread, abs=1e-4)


def _head() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(9)
    return jnp.asarray(rng.normal(size=ENCODER.width), jnp.float32), jnp.float32(0.3)


def test_ppo_takes_the_kl_from_the_rewards() -> None:
    given = batch()
    metrics = Learning(mesh_of(), TOWER, PPOConfig(kl=0.1), keeps_reference=True).step(given)
    valid = np.asarray((given.lengths > 0) & given.scored[:, None])
    kl = (given.log_probs - np.asarray(log_probs(TOWER, given)))[valid].mean()
    assert metrics["kl"] == pytest.approx(kl, abs=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        grpo(),
        pytest.param(PPOConfig(members=4, epochs=2, minibatches=2), id="ppo"),
        pytest.param(
            grpo(epochs=2, minibatches=2, beta=0.1, aggregation="dr_grpo"),
            id="grpo in parts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_eight_devices_give_the_same(config: GRPOConfig | PPOConfig) -> None:
    given, found = batch(32), []
    for mesh in (mesh_of(), mesh_of(2, 2, 2)):
        learning = Learning(mesh, TOWER, config, keeps_reference=True, rules=PARTITION_RULES)
        metrics = learning.step(given)
        del metrics["padding_share"]
        found.append((metrics, jax.tree.map(np.asarray, learning.state._replace(key=0))))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-5)
    for one, other in zip(*(jax.tree.leaves(state) for _, state in found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_adapters_on_a_frozen_base() -> None:
    given = batch()
    made = jax.tree.map(lambda leaf: leaf[0], adapters("bert", 3))
    learning = Learning(mesh_of(), made, grpo(), base=TOWER)
    learning.step(given)

    def loss(own: Params) -> jax.Array:
        return grpo_loss(attach(Adapted(TOWER, own), ENCODER.lora_scale), given, grpo(), None)

    check_moved(learning.state.params, made, jax.grad(loss)(made))


@pytest.mark.parametrize("fields", [{}, {"aggregation": "bnpo", "beta": 0.3, "entropy": 0.1}])
def test_a_group_of_equal_rewards_counts_in_the_divisor(fields: dict[str, Any]) -> None:
    """Its advantages are 0, but KL and entropy act on it; what failed is in neither."""
    own = episodes(8)
    flat = [each._replace(episode=[0.5], hops=[[0.25]] * len(each.searches)) for each in own[:4]]
    halves = [hop_batch(half, SHAPE, POLICY) for half in (flat, own[4:])]
    config = grpo(**fields)

    def moves(given: HopBatch) -> Any:
        learning = Learning(mesh_of(), TOWER, config, keeps_reference=True)
        assert learning.step(given)["flat_groups"] in (0.0, 0.5, 1.0)
        return jax.tree.map(lambda a, b: np.asarray(a) - b, learning.state.params, TOWER)

    def weight(given: HopBatch) -> int:
        valid = (given.lengths > 0) & given.scored[:, None]
        return (valid if config.aggregation == "bnpo" else valid.any(axis=1)).sum()

    both = moves(hop_batch(flat + own[4:], SHAPE, POLICY))
    total = sum(map(weight, halves))
    parts = [moves(half) for half in halves]
    moved = any(np.any(leaf) for leaf in jax.tree.leaves(parts[0]))
    assert moved == bool(config.entropy)  # a KL to the weights themselves has no gradient yet
    expected = jax.tree.map(
        lambda *each: sum(weight(half) / total * move for half, move in zip(halves, each)), *parts
    )
    for one, other in zip(*map(jax.tree.leaves, (both, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_minibatches_are_not_drawn_by_the_keys_of_episodes() -> None:
    state = Learning(mesh_of(), TOWER, PPOConfig(minibatches=2)).state
    order = minibatch_order(state, PPOConfig(minibatches=2), 16).reshape(-1)
    of_episodes = jax.random.split(jax.random.fold_in(state.key, state.step), 16)
    others = jax.vmap(lambda key: jax.random.permutation(key, 16))(of_episodes)
    assert sorted(order.tolist()) == [*range(16)]
    assert order.tolist() not in others.tolist()


def test_a_batch_without_any_reward_changes_nothing() -> None:
    nothing = [each._replace(episode=None) for each in episodes(8)]
    learning = Learning(mesh_of(), TOWER, grpo())
    metrics = learning.step(hop_batch(nothing, SHAPE, POLICY))
    assert metrics["unscored_share"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())
    for one, other in zip(*map(jax.tree.leaves, (learning.state.params, TOWER)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_update_that_is_not_finite_learns_nothing() -> None:
    given = batch()
    given.episode_rewards[0] = np.inf
    learning = Learning(mesh_of(), TOWER, grpo())
    metrics = learning.step(given)
    assert metrics["skipped"] == 1.0
    for one, other in zip(*map(jax.tree.leaves, (learning.state.params, TOWER)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_learns_which_passage_is_worth_most() -> None:
    """Four states, each with one right passage of five, drawn by the policy itself."""
    rng = np.random.default_rng(5)
    states = [rng.integers(5, 40, 8).astype(np.int32) for _ in range(4)]
    vectors = rng.normal(size=(4, POLICY.pool, SHAPE.width)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    learning = Learning(mesh_of(), TOWER, grpo())
    returns = []
    for _ in range(40):
        own = episodes(4 * MEMBERS)
        asked = [
            each.searches[0]._replace(
                row=states[n // MEMBERS], pool=np.arange(5), vectors=vectors[n // MEMBERS]
            )
            for n, each in enumerate(own)
        ]
        given = hop_batch([Rewarded([s], [0.0]) for s in asked], SHAPE, POLICY)
        found = embedded(learning.state.params, given)[:, 0]
        scores = np.einsum("nd,nkd->nk", found, given.pool[:, 0]) / POLICY.tau
        noisy = scores + rng.gumbel(size=scores.shape)
        actions = np.argsort(-noisy)[:, : POLICY.passages].astype(np.int32)
        right = (actions == (np.arange(len(own)) // MEMBERS)[:, None]).any(axis=1)
        given.actions[:, 0], given.episode_rewards[:, 0] = actions, right
        given.log_probs[:, 0] = np.asarray(log_probs(learning.state.params, given))[:, 0]
        returns.append(learning.step(given)["return"])
    assert np.mean(returns[-10:]) > np.mean(returns[:10]) + 0.2


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (GRPOConfig, {"members": 1}, "config.grpo.members is 1"),
        (GRPOConfig, {"beta": -0.1}, "config.grpo.beta is -0.1; it must be at least 0."),
        (GRPOConfig, {"aggregation": "mean"}, "config.grpo.aggregation is 'mean'; use one of"),
        (PPOConfig, {"lambda_": 1.5}, "config.ppo.lambda_ is 1.5; it must be 0 to 1."),
        (PPOConfig, {"critic_learning_rate": 0.0}, "config.ppo.critic_learning_rate is 0.0"),
    ],
)
def test_refusals(kind: type, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told.replace(".", r"\.")):
        kind(**fields)

"""Updates of a query encoder against the gradient of the whole loss by its definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.learners.config import SearchGRPOConfig
from qrag_jax.learners.query_encoder import minibatch_order
from qrag_jax.learners.state import Critic
from qrag_jax.policies.plackett_luce import entropy
from qrag_jax.rollouts.pool_search import HopBatch
from tests.learners import updates
from tests.learners.updates import check_moved, embedded, hop_log_probs, hops, logits_of, searches

TOWER = updates.HOP_TOWER
FRESH = SearchGRPOConfig(members=updates.QUESTION_MEMBERS)


def normal(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=1) + 1e-4)


def advantages(given: HopBatch) -> np.ndarray:
    """GRPO's, group by group, in float64; NaN where nothing is learned, 0 of equal rewards."""
    found, ((whole,), (each,)) = np.full(given.lengths.shape, np.nan), updates.HOP_WEIGHTS
    for start in range(0, len(given.scored), updates.QUESTION_MEMBERS):
        members = [n for n in range(start, start + updates.QUESTION_MEMBERS) if given.scored[n]]
        hops = [(n, t) for n in members for t in range(updates.HOPS.hops) if given.lengths[n, t]]
        of_episode = dict(zip(members, normal(np.float64(given.episode_rewards[members, 0]))))
        of_hop = normal(np.array([given.hop_rewards[n, t, 0] for n, t in hops], np.float64))
        by_hop = dict(zip(hops, of_hop))
        for n, t in hops:
            to_go = sum(value for (m, s), value in by_hop.items() if m == n and s >= t)
            found[n, t] = whole * of_episode[n] + each * to_go
    return found


def grpo_loss(params: Any, given: HopBatch, config: SearchGRPOConfig, old: Any, own: Any) -> Any:
    """Eq. 12 of HARR with a KL and the entropy, over the episodes `own`.

    The mean over searches of each episode, then over episodes; of BNPO: over all searches. What
    failed is in neither; the flat group is.
    """
    worth, new = advantages(given), hop_log_probs(params, given)
    valid = jnp.asarray(~np.isnan(worth)) & own[:, None]
    gains = jnp.asarray(np.nan_to_num(worth), jnp.float32)
    before = jax.lax.stop_gradient(new) if old is None else jnp.asarray(old)
    ratio = jnp.exp(jnp.where(valid, new - before, 0.0))
    bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    each = -jnp.minimum(ratio * gains, bounded * gains)
    away = hop_log_probs(TOWER, given) - new
    each += config.beta * (jnp.exp(away) - away - 1)
    each -= config.entropy * entropy(logits_of(params, given))
    each = jnp.where(valid, each, 0.0)
    if config.aggregation == "bnpo":
        return each.sum() / valid.sum()
    return (each.sum(1) / jnp.maximum(valid.sum(1), 1)).sum() / valid.any(1).sum()


@pytest.mark.parametrize("is_fresh", [True, False])
def test_grpo_in_one_step(is_fresh: bool) -> None:
    """Ratios are to the stored log-probabilities, or are 1 of the weights that acted."""
    given, learning = hops(), searches(FRESH, is_fresh=is_fresh)
    metrics, everything = learning.step(given), np.ones(len(given.scored), bool)
    old = None if is_fresh else given.log_probs
    slow = jax.jit(jax.value_and_grad(lambda p: grpo_loss(p, given, FRESH, old, everything)))
    loss, gradient = slow(TOWER)
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
    check_moved(learning.state.params, TOWER, gradient, rate=updates.HOP_RATE, rtol=2e-5)
    assert (metrics["largest_ratio"] == 1.0) == (metrics["clip_fraction"] == 0.0) == is_fresh


def test_minibatches_and_epochs_on_weights_that_have_moved() -> None:
    given, config, learning = hops(), updates.HARR_GRPO, searches(updates.HARR_GRPO)
    order = np.asarray(minibatch_order(learning.state, config, len(given.scored)))
    assert sorted(order[:2].reshape(-1)) == sorted(order[2:].reshape(-1)) == [*range(16)]
    assert order[:2].tolist() != order[2:].tolist()
    metrics, expected, losses = learning.step(given), TOWER, []
    slow = jax.jit(
        jax.value_and_grad(lambda p, own: grpo_loss(p, given, config, given.log_probs, own))
    )
    for places in order:
        own = np.isin(np.arange(16), places)
        loss, gradient = slow(expected, own)
        losses.append(float(loss))
        expected = jax.tree.map(lambda p, g: p - updates.HOP_RATE * g, expected, gradient)
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=2e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (learning.state.params, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)
    assert metrics["clip_fraction"] > 0
    assert metrics["largest_ratio"] > 1.1


def test_ppo_and_its_critic() -> None:
    """The KL (k1, by the stored log-probabilities) is taken from the rewards."""
    given, config = hops(), updates.HARR_PPO
    learning = searches(config)
    start = jax.tree.map(jnp.asarray, jax.device_get(learning.state.critic))
    metrics = learning.step(given)
    valid = np.asarray((given.lengths > 0) & given.scored[:, None])
    values = np.asarray(embedded(TOWER, given) @ start.weights + start.bias)
    kl = given.log_probs - np.asarray(hop_log_probs(TOWER, given))
    gains, returns = np.zeros(valid.shape), np.zeros(valid.shape)
    for n in range(len(valid)):
        after, advantage = 0.0, 0.0
        for t in reversed(np.flatnonzero(valid[n])):
            reward = 0.5 * given.hop_rewards[n, t, 0] - config.kl * kl[n, t]
            if t == valid[n].sum() - 1:
                reward += 0.8 * given.episode_rewards[n, 0]
            error = reward + 0.9 * after - values[n, t]
            advantage = error + 0.9 * 0.8 * advantage
            after = values[n, t]
            gains[n, t], returns[n, t] = advantage, advantage + values[n, t]
    white = (gains - gains[valid].mean()) / gains[valid].std(ddof=1)

    def policy_loss(params: Any) -> jax.Array:
        new = hop_log_probs(params, given)
        ratio = jnp.exp(new - jax.lax.stop_gradient(new))
        return -jnp.where(valid, ratio * white.astype(np.float32), 0.0).sum() / valid.sum()

    def value_loss(critic: Critic) -> jax.Array:
        found = embedded(critic.tower, given) @ critic.weights + critic.bias
        error = jnp.square(found - returns.astype(np.float32))
        return 0.5 * jnp.where(valid, error, 0.0).sum() / valid.sum()

    gradient = jax.jit(jax.grad(policy_loss))(TOWER)
    check_moved(learning.state.params, TOWER, gradient, rate=updates.HOP_RATE, rtol=2e-5)
    loss, gradient = jax.jit(jax.value_and_grad(value_loss))(start)
    check_moved(learning.state.critic, start, gradient, rate=updates.HOP_RATE, rtol=2e-5)
    spread = np.square(returns - returns[valid].mean())[valid].sum()
    expected = {
        "value_loss": float(loss),
        "explained_variance": 1 - np.square(gains)[valid].sum() / spread,
        "kl": kl[valid].mean(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-4), name

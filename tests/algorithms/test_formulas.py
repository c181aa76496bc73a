"""Advantages and returns beside slow NumPy versions; losses by hand and in their limits.

Losses and gradients of GRPO, its ratios and aggregations, PPO, DPO and IPO beside TRL and torch:
`tests/learners/test_token_losses_beside_trl.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.algorithms import pqn
from qrag_jax.algorithms.advantages import (
    EPSILON,
    best_of_groups,
    discounted_return,
    gae,
    group_advantages,
    lambda_returns,
    mixed_advantages,
    step_advantages,
    varies,
)
from qrag_jax.algorithms.policy_gradient import (
    Clip,
    clipped,
    clipped_weight,
    correction,
    departure,
    kl_k3,
    of_sequence,
)
from qrag_jax.algorithms.preference import Pair, dpo_loss, ipo_loss, margins
from tests import reference

# ------------------------------------------------------------------------ advantages, returns


def slow_group(rewards: np.ndarray, valid: np.ndarray, *, scaled: bool = True) -> np.ndarray:
    """One group, in float64: (r - mean) / (std + ε) of its valid members."""
    found = np.zeros(len(rewards))
    kept = rewards[valid].astype(np.float64)
    if len(kept) > 1 and kept.max() > kept.min():
        found[valid] = (kept - kept.mean()) / (kept.std(ddof=1) + EPSILON if scaled else 1.0)
    return found


def test_groups_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.random((40, 8)).astype(np.float32).round(1)
    valid = rng.random((40, 8)) < 0.6
    valid[0], valid[1], rewards[2] = False, [True] + [False] * 7, 0.3
    broken = np.where(valid, rewards, np.nan)  # a failed member has no reward
    for scaled in (True, False):
        expected = [slow_group(*group, scaled=scaled) for group in zip(rewards, valid, strict=True)]
        found = jax.jit(group_advantages, static_argnames="scaled")(broken, valid, scaled=scaled)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    differing = [len(set(r[v])) > 1 for r, v in zip(rewards, valid, strict=True)]
    np.testing.assert_array_equal(varies(broken, valid), differing)


def test_a_single_reward_keeps_the_sign_and_unscaled_the_size_of_its_weight() -> None:
    rewards, valid = jnp.array([[0.0, 1.0]]), np.array([[True, True]])
    avoided = mixed_advantages([rewards], (-1.0,), valid)
    np.testing.assert_array_equal(avoided, -group_advantages(rewards, valid))
    wanted = mixed_advantages([rewards], (3.0,), valid, scaled=False)
    np.testing.assert_allclose(wanted, [[-1.5, 1.5]])


def test_the_best_of_each_group() -> None:
    rewards = jnp.array([[0.1, 0.9, 0.9], [0.5, 0.5, 0.5], [0.9, 0.2, 0.1], [np.nan, 0.3, 0.4]])
    valid = np.array([[True] * 3, [True] * 3, [False, True, True], [False, True, True]])
    expected = [[0, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    np.testing.assert_array_equal(best_of_groups(rewards, valid), expected)


def test_equal_rewards_give_0_though_their_mean_is_rounded() -> None:
    """Of 100.1 a rounding is 8e-6, which over ε = 1e-4 would be an advantage of 0.07."""
    rewards = np.repeat(np.array([[0.1], [0.3], [100.1], [7.7]], np.float32), 7, axis=1)
    assert (np.asarray(group_advantages(rewards, np.ones((4, 7), bool))) == 0).all()


def test_several_rewards_count_by_their_weights_whatever_their_units() -> None:
    one, other = np.random.default_rng(2).random((2, 3, 6)).astype(np.float32)
    valid = np.ones((3, 6), bool)
    found = mixed_advantages([one, other], (1.0, 0.5), valid)
    again = mixed_advantages([one, 100 * other + 7], (1.0, 0.5), valid)
    np.testing.assert_allclose(found, again, atol=2e-3)
    for group in range(3):
        total = slow_group(one[group], valid[0]) + 0.5 * slow_group(other[group], valid[0])
        np.testing.assert_allclose(found[group], slow_group(total, valid[0]), atol=1e-4)
    with pytest.raises(ValueError, match="shorter"):
        mixed_advantages([one], (1.0, 0.5), valid)


def test_rewards_per_step_are_normalised_and_then_summed() -> None:
    rewards = np.random.default_rng(3).random((2, 3, 4)).astype(np.float32)
    valid = np.ones((2, 3, 4), bool)
    valid[0, 1, 2:] = valid[1, 0] = False
    found = np.asarray(step_advantages(np.where(valid, rewards, np.nan), valid))
    for group in range(2):
        normal = slow_group(rewards[group].ravel(), valid[group].ravel()).reshape(3, 4)
        for member, step in np.ndindex(3, 4):
            expected = normal[member, step:].sum() if valid[group, member, step] else 0.0
            assert found[group, member, step] == pytest.approx(expected, abs=1e-4)


def test_gae_is_that_of_each_episode_alone() -> None:
    """Episodes one after the other in a row, with masked stretches in and between them."""
    draw, width, discounts = np.random.default_rng(5), 64, (0.97, 0.8)
    valid, ends, episodes = np.zeros((3, width), bool), np.zeros((3, width), bool), []
    for row in range(3):
        start = 0
        while start < width - 6:
            length = int(draw.integers(1, 12))
            places = np.arange(start, min(start + length, width))
            chosen = places[draw.random(len(places)) < 0.7]
            if len(chosen):
                valid[row, chosen] = ends[row, chosen[-1]] = True
                episodes.append((row, chosen))
            start += length
    rewards, values = draw.normal(size=(2, *valid.shape)).astype(np.float32)
    rewards[~valid] = values[~valid] = np.nan  # nothing of these is read
    compute = jax.jit(gae, static_argnums=4)
    advantages, returns = map(np.asarray, compute(rewards, values, valid, ends, discounts))
    assert len(episodes) > 10
    for row, chosen in episodes:
        discount = np.full(len(chosen), discounts[0])
        discount[-1] = 0.0
        after = np.append(values[row, chosen[1:]], 0.0)
        expected = reference.lambda_returns(rewards[row, chosen], discount, after, discounts[1])
        np.testing.assert_allclose(returns[row, chosen], expected, atol=1e-5)
        gains = expected - values[row, chosen]
        np.testing.assert_allclose(advantages[row, chosen], gains, atol=1e-5)
    assert not advantages[~valid].any()
    assert not returns[~valid].any()


def test_lambda_returns_are_their_recursion() -> None:
    rng, ours = np.random.default_rng(0), jax.jit(lambda_returns, static_argnums=3)
    for trial in range(40):
        rewards, next_values = rng.standard_normal((2, 6))
        ends = rng.random(6) < 0.3 * (trial % 2)
        discounts, lambda_ = np.where(ends, 0.0, 0.97), (0.0, 0.65, 1.0)[trial % 3]
        rollout = [each.astype(np.float32) for each in (rewards, discounts, next_values)]
        found = np.asarray(ours(*rollout, lambda_))
        np.testing.assert_allclose(found, reference.lambda_returns(*rollout, lambda_), atol=1e-5)


def test_discounted_return() -> None:
    rewards = jnp.array([1.0, 0.0, 2.0, -1.0])
    expected = 1.0 + 0.5**2 * 2.0 - 0.5**3
    assert float(discounted_return(rewards, 0.5)) == pytest.approx(expected)


# ------------------------------------------------------------------------ losses


def test_departure_counts_ratios_that_have_gone_the_way_of_their_advantage() -> None:
    new = jnp.log(jnp.array([0.5, 1.0, 2.0, 0.5, 1.0, 2.0]))
    advantages = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    seen = departure(new, jnp.zeros(6), advantages, jnp.ones(6, bool), Clip(0.2, 0.3))
    assert (float(seen.clipped), float(seen.actions)) == (2.0, 6.0)
    assert float(seen.largest) == pytest.approx(2.0)


@pytest.mark.parametrize("gone", [-200.0, 200.0])  # e^89 is infinite in float32
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_policy_far_away_has_finite_losses_and_gradients(gone: float, advantage: float) -> None:
    old, given = jnp.zeros((1, 1)), jnp.full((1, 1), advantage)
    new = jnp.full((1, 1), gone)
    for loss in (
        lambda x: clipped(x, old, given),
        lambda x: clipped_weight(x, old, given),
        lambda x: clipped(of_sequence(x, old, np.ones((1, 1), bool)), old, given),
        lambda x: kl_k3(x, old),
    ):
        value, slope = jax.value_and_grad(lambda x, loss=loss: loss(x).sum())(new)
        assert np.isfinite(value)
        assert np.isfinite(slope).all()
    assert all(np.isfinite(each) for each in departure(new, old, given, np.ones((1, 1), bool)))
    if gone * advantage > 0:  # it has gone the way of its advantage: the clip's own value
        value, slope = jax.value_and_grad(lambda x: clipped(x, old, given).sum())(new)
        assert float(value) == pytest.approx(-1.2 if gone > 0 else 0.8)
        assert float(slope[0, 0]) == 0.0


def test_kl_never_pushes_a_policy_away_from_its_reference() -> None:
    """d/dx [exp(r − x) − (r − x) − 1] = 1 − exp(r − x): below 0 where x is below r."""
    for gone, slope in ((-200.0, 0.0), (-3.0, 1 - np.exp(3)), (200.0, 1.0)):
        found = jax.grad(kl_k3)(jnp.float32(gone), jnp.float32(0.0))
        assert float(found) == pytest.approx(slope, rel=1e-5)


def test_the_effective_share_of_a_sampler_that_is_the_policy_is_one() -> None:
    old = jnp.log(jnp.array([[0.2, 0.9, 0.5], [0.4, 0.4, 0.1]]))
    same = correction(old, old.at[1, 1].set(jnp.nan), jnp.isfinite(old).at[1, 1].set(False))
    assert float(same.effective_share()) == pytest.approx(1.0, rel=1e-6)
    assert float(same.kl) == pytest.approx(0.0, abs=1e-6)


# ------------------------------------------------------------------------ PQN, pairs


def test_targets_of_pqn_by_hand() -> None:
    # Three steps; two steps and the end; a row that fills up a batch.
    done = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    values = np.array([[9.0, 2.0, 4.0], [9.0, 3.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    rewards = np.array([[0.0, 0.0, 1.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    middle = 0.9 * (0.4 * 4 + 0.6 * 1)
    first = 0.9 * (0.4 * 2 + 0.6 * middle)
    expected = [[first, middle, 1], [0.5 + 0.9 * (0.4 * 3 + 0.6 * 1), 1, 0], [0, 0, 0]]
    found = jax.jit(pqn.targets, static_argnums=(3, 4))(rewards, done, values, 0.9, 0.6)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_alpha_is_above_zero_where_the_learning_rate_is_zero() -> None:
    assert float(pqn.alpha_at(0.05, jnp.float32(0.0), 2e-3)) == pytest.approx(5e-8)


def test_ipo_and_dpo_by_hand() -> None:
    # π prefers the winner by 3 nats, the reference the loser by 1: the policy has moved by 4.
    policy = Pair(np.float32([-2.0, -1.0]), np.float32([-5.0, -1.0]))
    by_reference = Pair(np.float32([-4.0, -7.0]), np.float32([-3.0, -7.0]))
    np.testing.assert_allclose(margins(policy, by_reference), [4.0, 0.0])
    # β = 0.05: ten nats are aimed at. A weight of 0 takes no part, whatever is there.
    h, weights = np.float32([0.5, -2.0, 0.0, np.nan]), np.float32([1.0, 0.25, 2.0, 0.0])
    total, weight = ipo_loss(h, weights, 0.05)
    assert float(total) == pytest.approx(9.5**2 + 0.25 * 12**2 + 2 * 10**2)
    assert float(weight) == 3.25
    # σ(ln 3) is ¾; of ten labels one is wrong: 0.9·ln(4/3) + 0.1·ln 4, and ln 2 of a margin of 0.
    h, weights = np.float32([np.log(3) / 0.1, 0.0]), np.float32([1.0, 3.0])
    expected = 0.9 * np.log(4 / 3) + 0.1 * np.log(4) + 3 * np.log(2)
    assert float(dpo_loss(h, weights, 0.1, 0.1)[0]) == pytest.approx(expected, rel=1e-6)


def test_far_margins_stay_finite() -> None:
    h, one = jnp.array([-1e4, 1e4]), jnp.ones(2)
    value, gradient = jax.value_and_grad(lambda h: dpo_loss(h, one, 0.1, 0.1)[0])(h)
    assert float(value) == pytest.approx(1000 * 0.9 + 1000 * 0.1, rel=1e-5)
    np.testing.assert_allclose(gradient, [-0.09, 0.01], atol=1e-6)

"""Advantages and returns beside slow NumPy versions; losses by hand and in their limits.

Losses and gradients of GRPO, its ratios and aggregations, PPO, DPO and IPO beside TRL and torch:
`tests/learners/test_token_losses_beside_trl.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.algorithms.advantages import (
    EPSILON,
    best_of_groups,
    discounted_return,
    gae,
    group_advantages,
    mixed_advantages,
    step_advantages,
    varies,
)
from qrag_jax.algorithms.policy_gradient import (
    Clip,
    clipped,
    clipped_weight,
    dpo_loss,
    is_clipped,
    kl_k3,
    largest_ratio,
    of_sequence,
)
from qrag_jax.algorithms.two_towers import alpha_at
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


def test_discounted_return() -> None:
    rewards = jnp.array([1.0, 0.0, 2.0, -1.0])
    expected = 1.0 + 0.5**2 * 2.0 - 0.5**3
    assert float(discounted_return(rewards, 0.5)) == pytest.approx(expected)


# ------------------------------------------------------------------------ losses


def test_clipped_are_ratios_that_have_gone_the_way_of_their_advantage() -> None:
    new = jnp.log(jnp.array([0.5, 1.0, 2.0, 0.5, 1.0, 2.0]))
    advantages = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    found = is_clipped(new, jnp.zeros(6), advantages, Clip(0.2, 0.3))
    assert found.tolist() == [False, False, True, True, False, False]
    assert float(largest_ratio(new, jnp.zeros(6), new < 0.1)) == pytest.approx(2.0)


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
    assert np.isfinite(largest_ratio(new, old, np.ones((1, 1), bool)))
    if gone * advantage > 0:  # it has gone the way of its advantage: the clip's own value
        value, slope = jax.value_and_grad(lambda x: clipped(x, old, given).sum())(new)
        assert float(value) == pytest.approx(-1.2 if gone > 0 else 0.8)
        assert float(slope[0, 0]) == 0.0


def test_kl_never_pushes_a_policy_away_from_its_reference() -> None:
    """d/dx [exp(r − x) − (r − x) − 1] = 1 − exp(r − x): below 0 where x is below r."""
    for gone, slope in ((-200.0, 0.0), (-3.0, 1 - np.exp(3)), (200.0, 1.0)):
        found = jax.grad(kl_k3)(jnp.float32(gone), jnp.float32(0.0))
        assert float(found) == pytest.approx(slope, rel=1e-5)


# ------------------------------------------------------------------------ PQN, pairs


def test_alpha_is_above_zero_where_the_learning_rate_is_zero() -> None:
    assert float(alpha_at(0.05, jnp.float32(0.0), 2e-3)) == pytest.approx(5e-8)


def test_far_margins_stay_finite() -> None:
    h, one = jnp.array([-1e4, 1e4]), jnp.ones(2)
    value, gradient = jax.value_and_grad(lambda h: dpo_loss(h, one, 0.1, 0.1))(h)
    assert float(value) == pytest.approx(1000 * 0.9 + 1000 * 0.1, rel=1e-5)
    np.testing.assert_allclose(gradient, [-0.09, 0.01], atol=1e-6)

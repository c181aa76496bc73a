"""Advantages and returns against slow NumPy versions; losses by hand and in their limits.

Losses and gradients of GRPO, its ratios and aggregations, and DPO next to TRL:
`tests/learners/test_token_losses_beside_trl.py`; of PPO, with GAE, and IPO by their definition:
`tests/learners/test_token_update.py`; of HARR, step by step: `tests/learners/test_query_update.py`.
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
    group_advantages,
    mixed_advantages,
    step_advantages,
)
from qrag_jax.algorithms.policy_gradient import (
    Clip,
    clipped,
    clipped_weight,
    dpo_loss,
    kl_k3,
    largest_ratio,
    of_sequence,
)
from qrag_jax.algorithms.two_towers import alpha_at

# ------------------------------------------------------------------------ advantages, returns


def slow_group(rewards: np.ndarray, valid: np.ndarray, *, scaled: bool = True) -> np.ndarray:
    """One group, in float64: (r - mean) / (std + ε) of its valid members."""
    found = np.zeros(len(rewards))
    kept = rewards[valid].astype(np.float64)
    if len(kept) > 1 and kept.max() > kept.min():
        found[valid] = (kept - kept.mean()) / (kept.std(ddof=1) + EPSILON if scaled else 1.0)
    return found


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


def test_rewards_of_actions_are_normalised_together_and_summed_to_the_end() -> None:
    rng = np.random.default_rng(3)
    rewards, valid = rng.random((4, 3, 5)).astype(np.float32), rng.random((4, 3, 5)) < 0.7
    found = step_advantages(jnp.array(rewards), valid)
    for group in range(4):
        normal = slow_group(rewards[group].ravel(), valid[group].ravel()).reshape(3, 5)
        to_go = np.cumsum(normal[:, ::-1], axis=1)[:, ::-1]
        np.testing.assert_allclose(found[group], np.where(valid[group], to_go, 0), atol=1e-4)


def test_discounted_return() -> None:
    rewards = jnp.array([1.0, 0.0, 2.0, -1.0])
    expected = 1.0 + 0.5**2 * 2.0 - 0.5**3
    assert float(discounted_return(rewards, 0.5)) == pytest.approx(expected)


# ------------------------------------------------------------------------ losses


@pytest.mark.parametrize("gone", [-200.0, 200.0])  # e^89 is infinite in float32
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_policy_far_away_has_finite_losses_and_gradients(gone: float, advantage: float) -> None:
    old, given = jnp.zeros((1, 1)), jnp.full((1, 1), advantage)
    new, clip = jnp.full((1, 1), gone), Clip(0.2, 0.2)
    for loss in (
        lambda x: clipped(x, old, given, clip),
        lambda x: clipped_weight(x, old, given, clip),
        lambda x: clipped(of_sequence(x, old, np.ones((1, 1), bool)), old, given, clip),
        lambda x: kl_k3(x, old),
    ):
        value, slope = jax.value_and_grad(lambda x, loss=loss: loss(x).sum())(new)
        assert np.isfinite(value)
        assert np.isfinite(slope).all()
    assert np.isfinite(largest_ratio(new, old, np.ones((1, 1), bool)))
    if gone * advantage > 0:  # it has gone the way of its advantage: the clip's own value
        value, slope = jax.value_and_grad(lambda x: clipped(x, old, given, clip).sum())(new)
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

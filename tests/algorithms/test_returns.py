"""λ-returns against their recursion and against their definition as a mixture of n-step returns."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.algorithms.returns import discounted_return, lambda_returns
from tests import reference

STEPS = 6


@pytest.fixture
def ours(variant) -> Callable[..., jax.Array]:
    return variant(lambda_returns, (3,))


def random_rollout(rng: np.random.Generator, ends: bool = True) -> tuple[np.ndarray, ...]:
    rewards, next_values = rng.standard_normal((2, STEPS))
    discounts = np.full(STEPS, 0.97)
    if ends:
        discounts[rng.random(STEPS) < 0.3] = 0.0
    return rewards, discounts, next_values


def n_step_return(rewards, discounts, next_values, t: int, n: int) -> float:
    """n rewards from step t on, then the value of the state they lead to."""
    total, weight = 0.0, 1.0
    for k in range(t, t + n):
        total += weight * rewards[k]
        weight *= discounts[k]
    return total + weight * next_values[t + n - 1]


def by_definition(rewards, discounts, next_values, lambda_: float, t: int) -> float:
    """`(1-λ)·Σ_{n<N} λ^{n-1}·G^{(n)} + λ^{N-1}·G^{(N)}`, N being the steps left in the rollout."""
    left = len(rewards) - t
    n_steps = [n_step_return(rewards, discounts, next_values, t, n) for n in range(1, left + 1)]
    weights = [(1 - lambda_) * lambda_ ** (n - 1) for n in range(1, left)]
    return float(np.dot([*weights, lambda_ ** (left - 1)], n_steps))


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.65, 1.0])
def test_recursion_and_definition(ours, lambda_) -> None:
    rng = np.random.default_rng(0)
    for trial in range(25):
        rollout = random_rollout(rng, ends=trial % 2 == 0)
        found = np.asarray(ours(*(x.astype(np.float32) for x in rollout), lambda_))
        np.testing.assert_allclose(found, reference.lambda_returns(*rollout, lambda_), atol=1e-5)
        mixture = [by_definition(*rollout, lambda_, t) for t in range(STEPS)]
        np.testing.assert_allclose(found, mixture, atol=1e-5)


def test_lambda_0_is_the_one_step_target(ours) -> None:
    rewards, discounts, next_values = random_rollout(np.random.default_rng(1))
    found = ours(rewards, discounts, next_values, 0.0)
    np.testing.assert_allclose(found, rewards + discounts * next_values, atol=1e-6)


def test_lambda_1_is_the_discounted_sum_of_rewards_and_the_last_value(ours, variant) -> None:
    rewards, discounts, next_values = random_rollout(np.random.default_rng(2), ends=False)
    powers = 0.97 ** np.arange(STEPS + 1)
    expected = (powers[:-1] * rewards).sum() + powers[-1] * next_values[-1]
    assert float(ours(rewards, discounts, next_values, 1.0)[0]) == pytest.approx(expected, abs=1e-5)
    discounts[-1] = 0.0  # the episode ends: no bootstrap
    found = float(ours(rewards, discounts, next_values, 1.0)[0])
    assert found == pytest.approx((powers[:-1] * rewards).sum(), abs=1e-5)
    assert found == pytest.approx(
        float(variant(discounted_return, (1,))(jnp.asarray(rewards), 0.97)), abs=1e-5
    )


def test_the_last_two_targets_of_a_rollout_cut_short(ours) -> None:
    # G_{T-1} = r + γ·v_T, and G_{T-2} mixes v_{T-1} with THAT return: an implementation whose
    # backward scan starts one value too late puts v_T in the place of v_{T-1}.
    rewards, values = np.array([0.5, 0.25]), np.array([2.0, 10.0])
    gamma, lambda_ = 0.9, 0.6
    last = 0.25 + gamma * 10.0
    second_to_last = 0.5 + gamma * (0.4 * 2.0 + 0.6 * last)
    wrong = 0.5 + gamma * (0.4 * 10.0 + 0.6 * last)
    found = ours(rewards, np.full(2, gamma), values, lambda_)
    np.testing.assert_allclose(found, [second_to_last, last], rtol=1e-6)
    assert abs(float(found[0]) - wrong) > 1


def test_nothing_leaks_over_an_episodes_end(ours) -> None:
    rewards, discounts, next_values = random_rollout(np.random.default_rng(3), ends=False)
    discounts[2] = 0.0
    changed = next_values.copy(), rewards.copy()
    changed[0][2:] += 100.0
    changed[1][3:] += 100.0
    found = ours(rewards, discounts, next_values, 0.65)
    other = ours(changed[1], discounts, changed[0], 0.65)
    np.testing.assert_allclose(found[:3], other[:3], atol=1e-6)
    assert float(found[2]) == pytest.approx(rewards[2], abs=1e-6)


def test_discounted_return(variant) -> None:
    rewards = jnp.array([1.0, 0.0, 2.0, -1.0])
    expected = 1.0 + 0.5**2 * 2.0 - 0.5**3
    assert float(variant(discounted_return, (1,))(rewards, 0.5)) == pytest.approx(expected)

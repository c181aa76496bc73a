"""Advantages and λ-returns against values worked out by hand and slow NumPy versions."""

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
    lambda_returns,
    mixed_advantages,
    returns_to_go,
    step_advantages,
    varies,
    whitened,
)
from tests import reference

ALL = np.array([[True, True]])
STEPS = 6


def slow_group(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """One group, in float64: (r - mean) / (std + ε) of its valid members."""
    found = np.zeros(len(rewards))
    kept = rewards[valid].astype(np.float64)
    if len(kept) > 1 and kept.max() > kept.min():
        found[valid] = (kept - kept.mean()) / (kept.std(ddof=1) + EPSILON)
    return found


def test_two_members_by_hand() -> None:
    """r = 0, 1: mean 0.5, deviation √(0.25 + 0.25) = 0.7071, so ±0.5 / 0.7072 = ±0.70701."""
    rewards = jnp.array([[0.0, 1.0]])
    np.testing.assert_allclose(group_advantages(rewards, ALL), [[-0.70701, 0.70701]], atol=1e-5)
    np.testing.assert_allclose(group_advantages(rewards, ALL, scaled=False), [[-0.5, 0.5]])
    # A single reward keeps the sign and, where nothing is scaled, the size of its weight.
    avoided = mixed_advantages([rewards], (-1.0,), ALL)
    np.testing.assert_array_equal(avoided, -group_advantages(rewards, ALL))
    wanted = mixed_advantages([rewards], (3.0,), ALL, scaled=False)
    np.testing.assert_allclose(wanted, [[-1.5, 1.5]])


def test_groups_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.random((40, 8)).astype(np.float32).round(1)
    valid = rng.random((40, 8)) < 0.6
    valid[0], valid[1], rewards[2] = False, [True] + [False] * 7, 0.3
    expected = [slow_group(*group) for group in zip(rewards, valid, strict=True)]
    broken = np.where(valid, rewards, np.nan)  # a failed member has no reward
    found = jax.jit(group_advantages)(broken, valid)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    differing = [len(set(r[v])) > 1 for r, v in zip(rewards, valid, strict=True)]
    np.testing.assert_array_equal(varies(broken, valid), differing)


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


def test_returns_to_go_and_gae_by_hand() -> None:
    """γ = λ = 0.5: δ_1 = 1 - 0.6 = 0.4, δ_0 = 0 + 0.5·0.6 - 0.2 = 0.1, A_0 = 0.1 + 0.25·0.4."""
    valid = np.array([[True, True, False, True]])
    found = returns_to_go(jnp.array([[1.0, 2.0, jnp.nan, 4.0]]), valid)
    np.testing.assert_allclose(found, [[7.0, 6.0, 0.0, 4.0]])
    rewards, values = jnp.array([[0.0, 1.0, 9.0]]), jnp.array([[0.2, 0.6, jnp.nan]])
    valid, ends = np.array([[True, True, False], [False, True, False]])[:, None]
    advantages, returns = gae(rewards, values, valid, ends, (0.5, 0.5))
    np.testing.assert_allclose(advantages, [[0.2, 0.4, 0.0]], atol=1e-6)
    np.testing.assert_allclose(returns, [[0.4, 1.0, 0.0]], atol=1e-6)


def test_whitened() -> None:
    rng = np.random.default_rng(6)
    given, valid = rng.normal(3, 2, (6, 5)).astype(np.float32), rng.random((6, 5)) < 0.7
    found = np.asarray(whitened(np.where(valid, given, np.nan), valid))
    assert found[valid].mean() == pytest.approx(0.0, abs=1e-5)
    assert found[valid].std(ddof=1) == pytest.approx(1.0, abs=1e-5)
    assert (found[~valid] == 0).all()


@pytest.mark.parametrize("discounts", [(0.97, 0.8), (1.0, 1.0)])
def test_gae_is_that_of_each_episode_alone(discounts: tuple[float, float]) -> None:
    """Episodes one after the other in a row, with masked stretches in and between them."""
    draw, width = np.random.default_rng(5), 64
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
    advantages, returns = map(np.asarray, gae(rewards, values, valid, ends, discounts))
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


# ------------------------------------------------------------------------ λ-returns

ours = jax.jit(lambda_returns, static_argnums=3)


def random_rollout(rng: np.random.Generator, ends: bool = True) -> tuple[np.ndarray, ...]:
    rewards, next_values = rng.standard_normal((2, STEPS))
    discounts = np.full(STEPS, 0.97)
    if ends:
        discounts[rng.random(STEPS) < 0.3] = 0.0
    return tuple(each.astype(np.float32) for each in (rewards, discounts, next_values))


@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
def test_returns_are_their_recursion(lambda_: float) -> None:
    rng = np.random.default_rng(0)
    for trial in range(25):
        rollout = random_rollout(rng, ends=trial % 2 == 0)
        found = np.asarray(ours(*rollout, lambda_))
        np.testing.assert_allclose(found, reference.lambda_returns(*rollout, lambda_), atol=1e-5)


def test_the_last_two_targets_of_a_rollout_cut_short() -> None:
    # G_{T-1} = r + γ·v_T, and G_{T-2} mixes v_{T-1} with THAT return: an implementation whose
    # backward scan starts one value too late puts v_T in the place of v_{T-1}.
    rewards, values = np.float32([0.5, 0.25]), np.float32([2.0, 10.0])
    last = 0.25 + 0.9 * 10.0
    second_to_last = 0.5 + 0.9 * (0.4 * 2.0 + 0.6 * last)
    found = ours(rewards, np.full(2, 0.9, np.float32), values, 0.6)
    np.testing.assert_allclose(found, [second_to_last, last], rtol=1e-6)


def test_nothing_leaks_over_an_episodes_end() -> None:
    rewards, discounts, next_values = random_rollout(np.random.default_rng(3), ends=False)
    discounts[2] = 0.0
    values, later = next_values.copy(), rewards.copy()
    values[2:] += 100.0
    later[3:] += 100.0
    found = ours(rewards, discounts, next_values, 0.65)
    other = ours(later, discounts, values, 0.65)
    np.testing.assert_allclose(found[:3], other[:3], atol=1e-6)
    assert float(found[2]) == pytest.approx(rewards[2], abs=1e-6)


def test_discounted_return() -> None:
    rewards = jnp.array([1.0, 0.0, 2.0, -1.0])
    expected = 1.0 + 0.5**2 * 2.0 - 0.5**3
    assert float(discounted_return(rewards, 0.5)) == pytest.approx(expected)

"""Advantages against values worked out by hand and against slow NumPy versions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.algorithms.advantages import (
    EPSILON,
    best_of_groups,
    gae,
    group_advantages,
    mixed_advantages,
    packed_gae,
    returns_to_go,
    step_advantages,
    varies,
    whitened,
)
from qrag_jax.algorithms.returns import lambda_returns

ALL = np.array([[True, True]])


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
    rng = np.random.default_rng(2)
    one, other = rng.random((2, 3, 6)).astype(np.float32)
    valid = np.ones((3, 6), bool)
    found = mixed_advantages([one, other], (1.0, 0.5), valid)
    again = mixed_advantages([one, 100 * other + 7], (1.0, 0.5), valid)
    np.testing.assert_allclose(found, again, atol=2e-3)
    for group in range(3):
        total = slow_group(one[group], valid[0]) + 0.5 * slow_group(other[group], valid[0])
        np.testing.assert_allclose(found[group], slow_group(total, valid[0]), atol=1e-4)
    single = mixed_advantages([one], (3.0,), valid)
    np.testing.assert_allclose(single, group_advantages(one, valid), atol=1e-3)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        mixed_advantages([one], (1.0, 0.5), valid)


def test_a_single_reward_keeps_the_sign_and_size_of_its_weight() -> None:
    rewards = jnp.array([[0.0, 1.0]])
    avoided = mixed_advantages([rewards], (-1.0,), ALL)
    np.testing.assert_array_equal(avoided, -group_advantages(rewards, ALL))
    wanted = mixed_advantages([rewards], (3.0,), ALL, scaled=False)
    np.testing.assert_allclose(wanted, [[-1.5, 1.5]])


def test_rewards_per_step_are_normalised_and_then_summed() -> None:
    rng = np.random.default_rng(3)
    rewards = rng.random((2, 3, 4)).astype(np.float32)
    valid = np.ones((2, 3, 4), bool)
    valid[0, 1, 2:] = valid[1, 0] = False
    found = np.asarray(step_advantages(np.where(valid, rewards, np.nan), valid))
    for group in range(2):
        normal = slow_group(rewards[group].ravel(), valid[group].ravel()).reshape(3, 4)
        for member in range(3):
            for step in range(4):
                expected = normal[member, step:].sum() if valid[group, member, step] else 0.0
                assert found[group, member, step] == pytest.approx(expected, abs=1e-4)


def test_returns_to_go_by_hand() -> None:
    valid = np.array([[True, True, False, True]])
    found = returns_to_go(jnp.array([[1.0, 2.0, jnp.nan, 4.0]]), valid)
    np.testing.assert_allclose(found, [[7.0, 6.0, 0.0, 4.0]])


def test_gae_by_hand() -> None:
    """γ = λ = 0.5: δ_1 = 1 - 0.6 = 0.4, δ_0 = 0 + 0.5·0.6 - 0.2 = 0.1, A_0 = 0.1 + 0.25·0.4."""
    rewards, values = jnp.array([[0.0, 1.0, 9.0]]), jnp.array([[0.2, 0.6, jnp.nan]])
    valid = np.array([[True, True, False]])
    advantages, returns = gae(rewards, values, valid, 0.5, 0.5)
    np.testing.assert_allclose(advantages, [[0.2, 0.4, 0.0]], atol=1e-6)
    np.testing.assert_allclose(returns, [[0.4, 1.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 0.95), (0.97, 0.0), (0.9, 1.0)])
def test_gae_is_the_lambda_return_less_the_value(gamma: float, lambda_: float) -> None:
    rng = np.random.default_rng(4)
    rewards, values = rng.normal(size=(2, 5, 7)).astype(np.float32)
    valid = np.ones((5, 7), bool)
    advantages, returns = jax.jit(gae, static_argnums=(3, 4))(
        rewards, values, valid, gamma, lambda_
    )
    discount = np.full(7, gamma, np.float32)
    discount[-1] = 0.0
    for row in range(5):
        after = np.append(values[row, 1:], 0.0).astype(np.float32)
        expected = lambda_returns(rewards[row], discount, after, lambda_)
        np.testing.assert_allclose(returns[row], expected, atol=1e-5)
        np.testing.assert_allclose(advantages[row], expected - values[row], atol=1e-5)


def test_gae_passes_over_what_is_not_an_action() -> None:
    """Tokens that the environment wrote lie between those that were sampled."""
    rng = np.random.default_rng(5)
    rewards, values = rng.normal(size=(2, 1, 4)).astype(np.float32)
    alone = gae(rewards, values, np.ones((1, 4), bool), 0.9, 0.8)
    places, valid = [1, 2, 5, 7], np.zeros((1, 9), bool)
    spread = np.full((2, 1, 9), np.nan, np.float32)
    valid[:, places], spread[:, :, places] = True, np.stack([rewards, values])
    found = gae(*spread, valid, 0.9, 0.8)
    for wide, narrow in zip(found, alone, strict=True):
        np.testing.assert_allclose(np.asarray(wide)[:, places], narrow, atol=1e-6)


def test_whitened() -> None:
    rng = np.random.default_rng(6)
    given, valid = rng.normal(3, 2, (6, 5)).astype(np.float32), rng.random((6, 5)) < 0.7
    found = np.asarray(whitened(np.where(valid, given, np.nan), valid))
    assert found[valid].mean() == pytest.approx(0.0, abs=1e-5)
    assert found[valid].std(ddof=1) == pytest.approx(1.0, abs=1e-5)
    assert (found[~valid] == 0).all()


def test_packed_gae_is_that_of_each_episode_alone() -> None:
    """Episodes one after the other in a row, with masked stretches in and between them."""
    draw = np.random.default_rng(5)
    width, discounts = 64, (0.97, 0.8)
    valid, ends = np.zeros((3, width), bool), np.zeros((3, width), bool)
    episodes = []
    for row in range(3):
        start = 0
        while start < width - 6:
            length = int(draw.integers(1, 12))
            places = np.arange(start, min(start + length, width))
            chosen = places[draw.random(len(places)) < 0.7]
            if len(chosen):
                valid[row, chosen] = True
                ends[row, chosen[-1]] = True
                episodes.append((row, chosen))
            start += length
    rewards = draw.normal(size=valid.shape).astype(np.float32)
    values = draw.normal(size=valid.shape).astype(np.float32)
    rewards[~valid] = values[~valid] = np.nan  # nothing of these is read
    advantages, returns = map(np.asarray, packed_gae(rewards, values, valid, ends, discounts))
    assert len(episodes) > 10
    for row, chosen in episodes:
        own = rewards[row, chosen][None], values[row, chosen][None]
        alone = gae(*map(jnp.asarray, own), jnp.ones((1, len(chosen)), bool), *discounts)
        np.testing.assert_allclose(advantages[row, chosen], alone[0][0], atol=1e-5)
        np.testing.assert_allclose(returns[row, chosen], alone[1][0], atol=1e-5)
    assert not advantages[~valid].any()
    assert not returns[~valid].any()


def test_packed_gae_of_1_and_1_is_the_reward_to_go() -> None:
    rewards = np.array([[1.0, 2.0, 4.0, 8.0, 16.0]], np.float32)
    values = np.array([[0.5, 0.0, 0.0, 3.0, 0.0]], np.float32)
    valid = np.array([[True, True, False, True, True]])
    ends = np.array([[False, True, False, False, True]])
    advantages, returns = packed_gae(rewards, values, valid, ends, (1.0, 1.0))
    np.testing.assert_allclose(returns, [[3.0, 2.0, 0.0, 24.0, 16.0]])
    np.testing.assert_allclose(advantages, [[2.5, 2.0, 0.0, 21.0, 16.0]])

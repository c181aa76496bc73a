"""Policy and soft value against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.policies import soft_q
from tests import reference

TOP_K, CHUNKS = 3, 7


def random_rows(seed: int, rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Twin values `[rows, C, 2]`, and availability with every count from none to all."""
    rng = np.random.default_rng(seed)
    twin = rng.standard_normal((rows, CHUNKS, 2)).astype(np.float32)
    available = np.zeros((rows, CHUNKS), bool)
    for row in range(rows):
        available[row, rng.permutation(CHUNKS)[: row % (CHUNKS + 1)]] = True
    return twin, available


def test_twin_q_is_two_inner_products_of_halves(variant) -> None:
    rng = np.random.default_rng(0)
    state, chunks = rng.standard_normal((3, 4, 8)), rng.standard_normal((3, 4, 5, 8))
    state, chunks = state.astype(np.float32), chunks.astype(np.float32)
    found = np.asarray(variant(soft_q.twin_q)(state, chunks))
    assert found.shape == (3, 4, 5, 2)
    for place in np.ndindex(3, 4, 5):
        s, a = state[place[:2]].astype(np.float64), chunks[place].astype(np.float64)
        np.testing.assert_allclose(found[place], [s[:4] @ a[:4], s[4:] @ a[4:]], atol=1e-5)
        np.testing.assert_allclose(found[place].sum(), s @ a, atol=1e-5)


@pytest.mark.parametrize("alpha", [1.0, 0.05, 0.005])
@pytest.mark.parametrize("top_k", [1, TOP_K, 50])
def test_log_policy(alpha, top_k, variant) -> None:
    twin, available = random_rows(1)
    q = twin.sum(-1)
    found = np.asarray(variant(soft_q.log_policy, (3,))(q, available, alpha, top_k))
    assert np.isfinite(found).all()
    for row in range(len(q)):
        expected = reference.log_policy(q[row], available[row], alpha, top_k)
        drawable = np.isfinite(expected)
        assert drawable.sum() == min(top_k, available[row].sum())
        # q/α reaches some hundreds, of which float32 keeps seven digits.
        np.testing.assert_allclose(found[row][drawable], expected[drawable], rtol=1e-5, atol=1e-4)
        assert (found[row][~drawable] <= soft_q.MASKED).all()


def test_ties_with_the_kth_value_can_all_be_drawn(variant) -> None:
    q = np.array([2.0, 1.0, 1.0, 1.0, 0.0, 1.0, 3.0], np.float32)
    available = np.array([True, True, True, True, True, False, True])
    found = np.exp(np.asarray(variant(soft_q.log_policy, (3,))(q, available, 1.0, 3)))
    # Top 3 are 3, 2 and 1; three available chunks have the value 1.
    assert (found > 0).tolist() == [True, True, True, True, False, False, True]
    np.testing.assert_allclose(found[1:4], found[1])
    np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-6)
    expected = reference.log_policy(q, available, 1.0, 3)
    np.testing.assert_allclose(found, np.exp(expected), rtol=1e-5)


def test_log_uniform(variant) -> None:
    _, available = random_rows(2)
    found = np.asarray(variant(soft_q.log_uniform)(available))
    assert np.isfinite(found).all()
    for row, left in zip(found, available, strict=True):
        np.testing.assert_allclose(row[left], -np.log(max(left.sum(), 1)), rtol=1e-6)
        assert (row[~left] <= soft_q.MASKED).all()


def test_entropy(variant) -> None:
    twin, available = random_rows(3)
    policy = variant(soft_q.log_policy, (3,))(twin.sum(-1), available, 0.5, 5)
    found = np.asarray(variant(soft_q.entropy)(policy))
    for row in range(len(found)):
        expected = reference.entropy(
            reference.log_policy(twin[row].sum(-1), available[row], 0.5, 5)
        )
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-6)
    uniform = np.asarray(variant(soft_q.entropy)(variant(soft_q.log_uniform)(available)))
    np.testing.assert_allclose(uniform, np.log(np.maximum(available.sum(-1), 1)), atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 0.05, 0.005])
@pytest.mark.parametrize("top_k", [1, TOP_K, 50])
def test_soft_value(alpha, top_k, variant) -> None:
    twin, available = random_rows(4)
    found = np.asarray(variant(soft_q.soft_value, (3,))(twin, available, alpha, top_k))
    for row in range(len(found)):
        expected = reference.soft_value(twin[row], available[row], alpha, top_k)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-6)


def test_soft_value_takes_the_top_k_of_each_half_on_its_own(variant) -> None:
    twin = np.array([[3.0, 0.0], [2.0, 1.0], [0.0, 5.0]], np.float32)
    everything = np.ones(3, bool)
    assert float(variant(soft_q.soft_value, (3,))(twin, everything, 0.7, 1)) == pytest.approx(
        3.0 + 5.0
    )
    pairs = 0.7 * np.log(np.exp(np.array([[3.0, 2.0], [5.0, 1.0]]) / 0.7).sum(1)).sum()
    assert float(variant(soft_q.soft_value, (3,))(twin, everything, 0.7, 2)) == pytest.approx(
        pairs, rel=1e-5
    )


def test_soft_value_counts_no_more_than_k_of_equal_values(variant) -> None:
    # Unlike the policy, which may draw every tie: the sum has exactly k terms.
    twin = np.full((5, 2), 1.5, np.float32)
    value = float(variant(soft_q.soft_value, (3,))(twin, np.ones(5, bool), 0.1, 3))
    assert value == pytest.approx(2 * (1.5 + 0.1 * np.log(3)), rel=1e-6)


def test_without_any_action(variant) -> None:
    twin, nothing = random_rows(5)[0][0], np.zeros(CHUNKS, bool)
    assert float(variant(soft_q.soft_value, (3,))(twin, nothing, 0.1, TOP_K)) == 0.0
    policy = variant(soft_q.log_policy, (3,))(twin.sum(-1), nothing, 0.1, TOP_K)
    assert (np.asarray(policy) <= soft_q.MASKED).all()
    assert float(variant(soft_q.entropy)(policy)) == 0.0
    assert float(variant(soft_q.entropy)(variant(soft_q.log_uniform)(nothing))) == 0.0


@pytest.mark.parametrize("alpha", [1e-4, 1e-6, 1e-8])
def test_a_tiny_temperature_gives_the_maximum_and_stays_finite(alpha) -> None:
    twin, available = random_rows(6)
    alpha = jnp.float32(alpha)
    policy, value = jax.jit(
        lambda: (
            soft_q.log_policy(twin.sum(-1), available, alpha, TOP_K),
            soft_q.soft_value(twin, available, alpha, TOP_K),
        )
    )()
    entropy = np.asarray(soft_q.entropy(policy))
    assert np.isfinite(policy).all()
    assert np.isfinite(entropy).all()
    for row, left in enumerate(available):
        if left.any():
            best = np.where(left, twin[row].sum(-1), -np.inf).argmax()
            assert np.asarray(policy)[row].argmax() == best
            assert float(policy[row, best]) == pytest.approx(0.0, abs=1e-6)
            assert entropy[row] == pytest.approx(0.0, abs=1e-6)
            assert float(value[row]) == pytest.approx(twin[row][left].max(0).sum(), abs=1e-3)


def test_draws_come_with_the_policys_probabilities(variant) -> None:
    q = np.array([0.3, 0.1, 0.25, -0.4, 0.28, 0.9], np.float32)
    available = np.array([True, True, True, True, True, False])
    policy = variant(soft_q.log_policy, (3,))(q, available, 0.1, 3)
    draws = 20_000
    keys = jax.random.split(jax.random.key(0), draws)
    actions = np.asarray(jax.jit(jax.vmap(jax.random.categorical, (0, None)))(keys, policy))
    seen = np.bincount(actions, minlength=6) / draws
    expected = np.exp(reference.log_policy(q, available, 0.1, 3))
    assert (seen[expected == 0] == 0).all()
    error = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(seen - expected) <= 5 * error).all()

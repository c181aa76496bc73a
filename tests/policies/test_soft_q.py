"""Policy and soft value against NumPy in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from qrag_jax.policies import soft_q
from tests import reference

TOP_K, CHUNKS = 3, 7
log_policy = jax.jit(soft_q.log_policy, static_argnums=3)
soft_value = jax.jit(soft_q.soft_value, static_argnums=3)


def random_rows(seed: int, rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Twin values `[rows, C, 2]`, and availability with every count from none to all."""
    rng = np.random.default_rng(seed)
    twin = rng.standard_normal((rows, CHUNKS, 2)).astype(np.float32)
    available = np.zeros((rows, CHUNKS), bool)
    for row in range(rows):
        available[row, rng.permutation(CHUNKS)[: row % (CHUNKS + 1)]] = True
    return twin, available


@pytest.mark.parametrize(("alpha", "top_k"), [(1.0, 1), (0.05, TOP_K), (1e-6, 50)])
def test_policy_entropy_and_value_are_those_of_numpy(alpha: float, top_k: int) -> None:
    twin, available = random_rows(1)
    q = twin.sum(-1)
    found, value = log_policy(q, available, alpha, top_k), soft_value(twin, available, alpha, top_k)
    entropy, found = soft_q.entropy(found), np.asarray(found)
    assert np.isfinite(found).all()
    for row, left in enumerate(available):
        expected = reference.log_policy(q[row], left, alpha, top_k)
        drawable = np.isfinite(expected)
        assert drawable.sum() == min(top_k, left.sum())
        # q/α reaches some hundreds, of which float32 keeps seven digits.
        np.testing.assert_allclose(found[row][drawable], expected[drawable], rtol=1e-4, atol=1e-4)
        assert (found[row][~drawable] <= soft_q.MASKED).all()
        own = reference.entropy(expected)
        np.testing.assert_allclose(entropy[row], own, rtol=1e-4, atol=1e-4)
        own = reference.soft_value(twin[row], left, alpha, top_k)
        np.testing.assert_allclose(value[row], own, rtol=1e-5, atol=1e-6)


def test_ties_with_the_kth_value_can_all_be_drawn() -> None:
    q = np.array([2.0, 1.0, 1.0, 1.0, 0.0, 1.0, 3.0], np.float32)
    available = np.array([True, True, True, True, True, False, True])
    found = np.exp(np.asarray(log_policy(q, available, 1.0, 3)))
    # Top 3 are 3, 2 and 1; three available chunks have the value 1.
    assert (found > 0).tolist() == [True, True, True, True, False, False, True]
    expected = reference.log_policy(q, available, 1.0, 3)
    np.testing.assert_allclose(found, np.exp(expected), rtol=1e-5)
    # Unlike the policy, which may draw every tie, the value has exactly k terms.
    twin = np.full((5, 2), 1.5, np.float32)
    value = float(soft_value(twin, np.ones(5, bool), 0.1, 3))
    assert value == pytest.approx(2 * (1.5 + 0.1 * np.log(3)), rel=1e-6)


def test_without_any_action() -> None:
    twin, nothing = random_rows(5)[0][0], np.zeros(CHUNKS, bool)
    assert float(soft_value(twin, nothing, 0.1, TOP_K)) == 0.0
    uniform = np.asarray(soft_q.log_uniform(np.arange(CHUNKS) < 3))
    np.testing.assert_allclose(uniform[:3], -np.log(3), rtol=1e-6)
    assert (uniform[3:] <= soft_q.MASKED).all()
    for policy in (log_policy(twin.sum(-1), nothing, 0.1, TOP_K), soft_q.log_uniform(nothing)):
        assert (np.asarray(policy) <= soft_q.MASKED).all()
        assert float(soft_q.entropy(policy)) == 0.0

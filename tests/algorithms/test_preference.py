"""Losses of pairs by hand, in NumPy, and by finite differences."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.algorithms.preference import Pair, dpo_loss, ipo_loss, margins

H = np.array([0.5, -2.0, 0.0, 7.0], np.float32)
WEIGHTS = np.array([1.0, 0.25, 2.0, 0.0], np.float32)


def test_a_margin_by_hand(variant) -> None:
    # π prefers the winner by 3 nats, the reference the loser by 1: the policy has moved by 4.
    policy = np.float32([-2.0, -1.0]), np.float32([-5.0, -1.0])
    reference = np.float32([-4.0, -7.0]), np.float32([-3.0, -7.0])

    def of_four(*log_probs: jax.Array) -> jax.Array:
        return margins(Pair(*log_probs[:2]), Pair(*log_probs[2:]))

    np.testing.assert_allclose(variant(of_four)(*policy, *reference), [4.0, 0.0])


def test_ipo_by_hand(variant) -> None:
    # β = 0.05: ten nats are aimed at.
    total, weight = variant(ipo_loss, (2,))(H, WEIGHTS, 0.05)
    assert float(total) == pytest.approx(9.5**2 + 0.25 * 12**2 + 2 * 10**2)
    assert float(weight) == 3.25


def test_dpo_by_hand(variant) -> None:
    # σ(ln 3) is ¾, so the loss of a margin of ln 3 / β is ln 4 − ln 3, and of one of 0, ln 2.
    h, weights = np.float32([math.log(3) / 0.1, 0.0]), np.float32([1.0, 3.0])
    total, weight = variant(dpo_loss, (2,))(h, weights, 0.1)
    assert float(total) == pytest.approx(math.log(4 / 3) + 3 * math.log(2), rel=1e-6)
    assert float(weight) == 4
    # Of ten labels one is wrong: 0.9·ln(4/3) + 0.1·ln 4.
    total, _ = variant(dpo_loss, (2, 3))(h, weights, 0.1, 0.1)
    expected = 0.9 * math.log(4 / 3) + 0.1 * math.log(4) + 3 * math.log(2)
    assert float(total) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_are_those_of_numpy(variant, smoothing: float) -> None:
    rng = np.random.default_rng(0)
    h = rng.normal(0, 30, 50).astype(np.float32)
    weights = (rng.random(50) * (rng.random(50) < 0.7)).astype(np.float32)
    beta, ipo, dpo = 0.3, 0.0, 0.0
    for each, weight in zip(h.astype(float), weights.astype(float)):
        right = 1 / (1 + math.exp(-beta * each))
        ipo += weight * (each - 1 / (2 * beta)) ** 2
        dpo -= weight * ((1 - smoothing) * math.log(right) + smoothing * math.log1p(-right))
    assert float(variant(ipo_loss, (2,))(h, weights, beta)[0]) == pytest.approx(ipo, rel=1e-5)
    found, weight = variant(dpo_loss, (2, 3))(h, weights, beta, smoothing)
    assert float(found) == pytest.approx(dpo, rel=1e-5)
    assert float(weight) == pytest.approx(weights.sum(), rel=1e-6)


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.2])
def test_gradients_are_finite_differences(smoothing: float | None) -> None:
    def loss(h: jax.Array) -> jax.Array:
        if smoothing is None:
            return ipo_loss(h, jnp.asarray(WEIGHTS), 0.4)[0]
        return dpo_loss(h, jnp.asarray(WEIGHTS), 0.4, smoothing)[0]

    step, found = 0.05, np.asarray(jax.grad(loss)(jnp.asarray(H)))
    for place in range(len(H)):
        moved = np.zeros_like(H)
        moved[place] = step
        slope = (loss(jnp.asarray(H + moved)) - loss(jnp.asarray(H - moved))) / (2 * step)
        assert found[place] == pytest.approx(float(slope), abs=1e-3)


def test_the_least_loss_is_where_it_is_aimed_at() -> None:
    one = jnp.ones(1)
    of_ipo = jax.grad(lambda h: ipo_loss(h, one, 0.05)[0])(jnp.array([10.0]))
    assert float(of_ipo[0]) == 0
    # σ(β·h) = 1 − ε: with a tenth of wrong labels at ln 9 / β.
    of_dpo = jax.grad(lambda h: dpo_loss(h, one, 0.5, 0.1)[0])(jnp.array([math.log(9) / 0.5]))
    assert float(of_dpo[0]) == pytest.approx(0, abs=1e-6)


def test_what_has_no_weight_has_no_part() -> None:
    h = jnp.array([1.0, np.nan, np.inf])
    weights = jnp.array([2.0, 0.0, 0.0])
    for loss in (lambda h: ipo_loss(h, weights, 0.5)[0], lambda h: dpo_loss(h, weights, 0.5)[0]):
        value, gradient = jax.value_and_grad(loss)(h)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[1:], 0)


def test_far_margins_stay_finite() -> None:
    h, one = jnp.array([-1e4, 1e4]), jnp.ones(2)
    value, gradient = jax.value_and_grad(lambda h: dpo_loss(h, one, 0.1, 0.1)[0])(h)
    assert float(value) == pytest.approx(1000 * 0.9 + 1000 * 0.1, rel=1e-5)
    np.testing.assert_allclose(gradient, [-0.09, 0.01], atol=1e-6)

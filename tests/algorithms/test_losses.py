"""PQN's and the preference losses by hand, in NumPy, and by finite differences."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.algorithms import pqn
from qrag_jax.algorithms.preference import Pair, dpo_loss, ipo_loss, margins

H = np.array([0.5, -2.0, 0.0, 7.0], np.float32)
WEIGHTS = np.array([1.0, 0.25, 2.0, 0.0], np.float32)


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


def test_loss_of_pqn() -> None:
    rng = np.random.default_rng(0)
    state, chunk = rng.standard_normal((2, 4, 3, 6)).astype(np.float32)
    goal = rng.standard_normal((4, 3)).astype(np.float32)
    valid = rng.random((4, 3)) < 0.7
    total, count = jax.jit(pqn.loss)(state, chunk, goal, valid)
    expected = 0.0
    for place in zip(*np.nonzero(valid)):
        q1 = float(state[place][:3] @ chunk[place][:3])
        q2 = float(state[place][3:] @ chunk[place][3:])
        expected += 0.5 * (2 * q1 - goal[place]) ** 2 + 0.5 * (2 * q2 - goal[place]) ** 2
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(count) == valid.sum()


@pytest.mark.parametrize(("rate", "alpha"), [(2e-3, 0.05), (5e-4, 0.0125), (0.0, 5e-8)])
def test_alpha_follows_the_learning_rate(rate: float, alpha: float) -> None:
    assert float(pqn.alpha_at(0.05, jnp.float32(rate), 2e-3)) == pytest.approx(alpha)


# ------------------------------------------------------------------------ pairs


def test_a_margin_by_hand() -> None:
    # π prefers the winner by 3 nats, the reference the loser by 1: the policy has moved by 4.
    policy = Pair(np.float32([-2.0, -1.0]), np.float32([-5.0, -1.0]))
    by_reference = Pair(np.float32([-4.0, -7.0]), np.float32([-3.0, -7.0]))
    np.testing.assert_allclose(margins(policy, by_reference), [4.0, 0.0])


def test_ipo_and_dpo_by_hand() -> None:
    # β = 0.05: ten nats are aimed at.
    total, weight = ipo_loss(H, WEIGHTS, 0.05)
    assert float(total) == pytest.approx(9.5**2 + 0.25 * 12**2 + 2 * 10**2)
    assert float(weight) == 3.25
    # σ(ln 3) is ¾, so the loss of a margin of ln 3 / β is ln 4 − ln 3, and of one of 0, ln 2.
    h, weights = np.float32([math.log(3) / 0.1, 0.0]), np.float32([1.0, 3.0])
    total, weight = dpo_loss(h, weights, 0.1)
    assert float(total) == pytest.approx(math.log(4 / 3) + 3 * math.log(2), rel=1e-6)
    assert float(weight) == 4
    # Of ten labels one is wrong: 0.9·ln(4/3) + 0.1·ln 4.
    expected = 0.9 * math.log(4 / 3) + 0.1 * math.log(4) + 3 * math.log(2)
    assert float(dpo_loss(h, weights, 0.1, 0.1)[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.2])
def test_gradients_of_pairs_are_finite_differences(smoothing: float | None) -> None:
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
    assert float(jax.grad(lambda h: ipo_loss(h, one, 0.05)[0])(jnp.array([10.0]))[0]) == 0
    # σ(β·h) = 1 − ε: with a tenth of wrong labels at ln 9 / β.
    of_dpo = jax.grad(lambda h: dpo_loss(h, one, 0.5, 0.1)[0])(jnp.array([math.log(9) / 0.5]))
    assert float(of_dpo[0]) == pytest.approx(0, abs=1e-6)


def test_what_has_no_weight_has_no_part() -> None:
    h, weights = jnp.array([1.0, np.nan, np.inf]), jnp.array([2.0, 0.0, 0.0])
    for loss in (ipo_loss, dpo_loss):
        value, gradient = jax.value_and_grad(lambda h, loss=loss: loss(h, weights, 0.5)[0])(h)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[1:], 0)


def test_far_margins_stay_finite() -> None:
    h, one = jnp.array([-1e4, 1e4]), jnp.ones(2)
    value, gradient = jax.value_and_grad(lambda h: dpo_loss(h, one, 0.1, 0.1)[0])(h)
    assert float(value) == pytest.approx(1000 * 0.9 + 1000 * 0.1, rel=1e-5)
    np.testing.assert_allclose(gradient, [-0.09, 0.01], atol=1e-6)

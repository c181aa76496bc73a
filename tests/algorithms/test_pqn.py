"""Targets, loss and temperature by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.algorithms import pqn


def test_targets_by_hand(variant) -> None:
    # Three steps; two steps and the end; a row that fills up a batch.
    done = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    values = np.array([[9.0, 2.0, 4.0], [9.0, 3.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    rewards = np.array([[0.0, 0.0, 1.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    middle = 0.9 * (0.4 * 4 + 0.6 * 1)
    first = 0.9 * (0.4 * 2 + 0.6 * middle)
    expected = [[first, middle, 1], [0.5 + 0.9 * (0.4 * 3 + 0.6 * 1), 1, 0], [0, 0, 0]]
    found = variant(pqn.targets, (3, 4))(rewards, done, values, 0.9, 0.6)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_loss(variant) -> None:
    rng = np.random.default_rng(0)
    state, chunk = rng.standard_normal((2, 4, 3, 6)).astype(np.float32)
    goal = rng.standard_normal((4, 3)).astype(np.float32)
    valid = rng.random((4, 3)) < 0.7
    total, count = variant(pqn.loss)(state, chunk, goal, valid)
    expected = 0.0
    for place in zip(*np.nonzero(valid)):
        q1 = float(state[place][:3] @ chunk[place][:3])
        q2 = float(state[place][3:] @ chunk[place][3:])
        expected += 0.5 * (2 * q1 - goal[place]) ** 2 + 0.5 * (2 * q2 - goal[place]) ** 2
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(count) == valid.sum()


def test_alpha_follows_the_learning_rate(variant) -> None:
    alpha_at = variant(pqn.alpha_at, (0, 2))
    assert float(alpha_at(0.05, jnp.float32(2e-3), 2e-3)) == pytest.approx(0.05)
    assert float(alpha_at(0.05, jnp.float32(5e-4), 2e-3)) == pytest.approx(0.0125)
    assert float(alpha_at(0.05, jnp.float32(0.0), 2e-3)) == pytest.approx(5e-8)

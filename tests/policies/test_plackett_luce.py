"""Plackett–Luce draws against the definition: a softmax over what is left, passage by passage."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.policies.plackett_luce import NOTHING, draw, entropy, greedy, log_prob
from qrag_jax.policies.soft_q import MASKED


def by_definition(logits: np.ndarray, actions: tuple[int, ...]) -> float:
    """The probability of an ordered draw, one softmax after the other, in float64."""
    left, probability = dict(enumerate(logits.astype(np.float64))), 1.0
    for action in actions:
        total = sum(math.exp(each) for each in left.values())
        probability *= math.exp(left.pop(action)) / total
    return probability


def ordered(places: int, k: int) -> np.ndarray:
    return np.array(list(itertools.permutations(range(places), k)), np.int32)


def test_probabilities_are_those_of_the_definition() -> None:
    logits = np.random.default_rng(5).normal(size=5).astype(np.float32) * 3
    all_draws = ordered(5, 3)
    found = jax.vmap(log_prob, (None, 0))(jnp.asarray(logits), all_draws)
    expected = [by_definition(logits, tuple(actions)) for actions in all_draws]
    np.testing.assert_allclose(np.exp(found), expected, rtol=2e-5)
    assert np.exp(np.asarray(found, np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_draws_are_as_frequent_as_they_are_probable() -> None:
    """Chi-square over all 24 ordered draws of three out of four; one place is empty."""
    logits = jnp.array([0.5, MASKED, -0.3, 1.1, 0.0], jnp.float32)
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.asarray(jax.vmap(lambda key: draw(key, logits, 3))(keys))
    assert not (drawn == 1).any()
    kept = np.array([0, 2, 3, 4])
    possible = kept[ordered(4, 3)]
    expected = len(keys) * np.exp(jax.vmap(log_prob, (None, 0))(logits, jnp.asarray(possible)))
    counted = (drawn[:, None] == possible[None]).all(axis=-1).sum(axis=0)
    assert counted.sum() == len(keys)
    chi_square = (np.square(counted - expected) / expected).sum()
    assert chi_square < 41.6  # 23 degrees of freedom, 1 in 100


def test_a_pool_of_fewer_than_k_is_drawn_to_its_end() -> None:
    logits = jnp.array([MASKED, 0.7, MASKED, -0.2], jnp.float32)
    drawn = np.asarray(draw(jax.random.key(3), logits, 6))
    assert sorted(drawn[:2]) == [1, 3]
    assert (drawn[2:] == NOTHING).all()
    first = by_definition(np.array([0.7, -0.2]), (0,))
    found = log_prob(logits, jnp.array([1, 3, NOTHING, NOTHING], jnp.int32))
    assert float(jnp.exp(found)) == pytest.approx(first, rel=1e-5)  # the second one is certain


def test_an_empty_pool() -> None:
    logits = jnp.full(3, MASKED, jnp.float32)
    drawn = draw(jax.random.key(0), logits, 2)
    assert (np.asarray(drawn) == NOTHING).all()
    value, gradient = jax.value_and_grad(lambda given: log_prob(given, drawn))(logits)
    assert float(value) == 0.0
    assert (np.asarray(gradient) == 0).all()
    assert float(entropy(logits)) == 0.0


def test_greedy_takes_the_best_and_of_equal_ones_the_first() -> None:
    logits = jnp.array([[0.1, 2.0, MASKED, 2.0], [MASKED, MASKED, 0.0, MASKED]], jnp.float32)
    np.testing.assert_array_equal(greedy(logits, 3), [[1, 3, 0], [2, NOTHING, NOTHING]])


def test_gradients_stay_finite_where_logits_are_far_apart() -> None:
    """cosine / τ spans 2 / 0.02 = 100."""
    logits = jnp.array([100.0, 0.0, -100.0], jnp.float32)
    value, gradient = jax.value_and_grad(log_prob)(logits, jnp.array([2, 1, 0], jnp.int32))
    assert float(value) == pytest.approx(-300.0)
    # The first draw and the second take 1 each from place 0; the third gives it 1 and takes 1.
    np.testing.assert_allclose(gradient, [-2.0, 1.0, 1.0], atol=1e-5)


def test_entropy_is_that_of_the_softmax() -> None:
    logits = np.random.default_rng(2).normal(size=(3, 5)).astype(np.float32)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -(p * np.log(p)).sum(axis=-1)
    padded = np.pad(logits, ((0, 0), (0, 2)), constant_values=MASKED)
    np.testing.assert_allclose(entropy(jnp.asarray(padded)), expected, rtol=1e-5)


def test_no_gradient_is_scattered() -> None:
    """A scatter with repeated places is slow on a GPU that adds in a fixed order."""
    actions = jnp.array([[2, 0, NOTHING]])
    gradient = jax.grad(lambda logits: log_prob(logits, actions).sum())
    assert "scatter" not in str(jax.make_jaxpr(gradient)(jnp.zeros((1, 4))))

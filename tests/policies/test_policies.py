"""Each policy beside its definition, in float64 or as a plain softmax."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.policies import soft_q
from qrag_jax.policies.plackett_luce import NOTHING, draw, entropy, greedy, log_prob
from qrag_jax.policies.soft_q import MASKED
from qrag_jax.policies.tokens import TokenScores, Vocabulary, token_scores
from tests import reference
from tests.devices import mesh_of

# ------------------------------------------------------------------------ Q-values


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


# ------------------------------------------------------------------------ Plackett–Luce draws


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


# ------------------------------------------------------------------------ tokens


ROWS, WORDS, WIDTH = 12, 101, 16


def setting(rows: int = ROWS, words: int = WORDS) -> tuple[jax.Array, jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    hidden = draw.normal(size=(rows, WIDTH)).astype(np.float32)
    head = draw.normal(size=(words, WIDTH)).astype(np.float32)
    tokens = draw.integers(0, words, rows)
    tokens[:2] = 0, words - 1
    return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens)


def plain(temperature: float, hidden: Any, head: Any, tokens: Any) -> TokenScores:
    """By the definition."""
    logits = jnp.matmul(hidden, head.T, precision="highest") / temperature
    log_probs = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=1)
    return TokenScores(log_probs[jnp.arange(len(tokens)), tokens], entropy)


def summed(scores: TokenScores) -> jax.Array:
    """A loss in which every number has another weight."""
    weights = jnp.arange(1.0, len(scores.log_probs) + 1)
    return (weights * scores.log_probs).sum() + (jnp.sqrt(weights) * scores.entropy).sum()


def check(how: Vocabulary, scale: float = 1.0, mesh: Mesh | None = None) -> None:
    """Scores and gradients are those of a plain softmax."""
    hidden, head, tokens = setting()
    hidden *= scale
    expected = plain(how.temperature, hidden, head, tokens)

    def theirs(hidden: Any, head: Any) -> jax.Array:
        return summed(plain(how.temperature, hidden, head, tokens))

    def ours(hidden: Any, head: Any) -> tuple[jax.Array, TokenScores]:
        scores = token_scores(how, hidden, head, tokens)
        return summed(scores), scores

    gradient = jax.grad(theirs, (0, 1))(hidden, head)
    if mesh is not None:  # each device has rows of its own and a part of the head
        axes = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
        hidden, head = jax.device_put((hidden, head), tuple(NamedSharding(mesh, a) for a in axes))
    found, scores = jax.jit(jax.grad(ours, (0, 1), has_aux=True))(hidden, head)
    for one, other in zip(scores, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * scale)
    for one, other in zip(found, gradient, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4 * scale)


def test_scores_are_those_of_a_softmax() -> None:
    check(Vocabulary(0.4, numbers=7 * ROWS))  # in blocks of the vocabulary
    check(Vocabulary(1.0, numbers=1000 * ROWS), scale=300.0)  # with logits far apart
    check(Vocabulary(numbers=30 * 3), mesh=mesh_of(fsdp=4))  # with the head in parts


def test_no_array_of_tokens_by_vocabulary() -> None:
    rows, words = 64, 1000
    hidden, head, tokens = setting(rows, words)

    def program(score: Any) -> str:
        def loss(hidden: Any, head: Any) -> jax.Array:
            return summed(score(hidden, head, tokens))

        return jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head).as_text()

    assert f"{rows}x{words}x" in program(partial(plain, 1.0))
    blocked = program(partial(token_scores, Vocabulary(numbers=rows * 50)))
    assert f"{rows}x{words}x" not in blocked

"""Each policy against its definition, in float64 or as a plain softmax; the best of many chunks."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.policies import soft_q
from qrag_jax.policies.plackett_luce import NOTHING, draw, entropy, greedy, log_prob
from qrag_jax.policies.soft_q import BLOCK, MASKED, make_best_chunks, padded_chunks
from qrag_jax.policies.tokens import TokenScores, Vocabulary, token_scores
from tests import reference
from tests.devices import mesh_of

# ------------------------------------------------------------------------ Q-values


TOP_K, CHUNKS = 3, 7
log_policy = jax.jit(soft_q.log_policy, static_argnums=3)
soft_value = jax.jit(soft_q.soft_value, static_argnums=3)


def random_rows(seed: int, rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Twin values `[rows, C, 2]`, many of them equal; of none to all actions available."""
    rng = np.random.default_rng(seed)
    twin = rng.integers(-3, 4, (rows, CHUNKS, 2)).astype(np.float32) / 2
    available = np.zeros((rows, CHUNKS), bool)
    for row in range(rows):
        available[row, rng.permutation(CHUNKS)[: row % (CHUNKS + 1)]] = True
    return twin, available


@pytest.mark.parametrize(("alpha", "top_k"), [(1.0, 1), (0.05, TOP_K), (1e-6, 50)])
def test_policy_entropy_and_value_are_those_of_numpy(alpha: float, top_k: int) -> None:
    """The policy may draw all that ties with the kth value; the soft value has k terms."""
    twin, available = random_rows(1)
    q, ties = twin.sum(-1), 0
    found, value = log_policy(q, available, alpha, top_k), soft_value(twin, available, alpha, top_k)
    entropy, found = soft_q.entropy(found), np.asarray(found)
    assert np.isfinite(found).all()
    for row, left in enumerate(available):
        expected = reference.log_policy(q[row], left, alpha, top_k)
        drawable = np.isfinite(expected)
        ties += drawable.sum() > top_k
        # q/α reaches some hundreds, of which float32 keeps seven digits.
        np.testing.assert_allclose(found[row][drawable], expected[drawable], rtol=1e-4, atol=1e-4)
        assert (found[row][~drawable] <= soft_q.MASKED).all()
        own = reference.entropy(expected)
        np.testing.assert_allclose(entropy[row], own, rtol=1e-4, atol=1e-4)
        own = reference.soft_value(twin[row], left, alpha, top_k)
        np.testing.assert_allclose(value[row], own, rtol=1e-5, atol=1e-6)
    assert ties or top_k > CHUNKS


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


def test_a_pool_of_fewer_than_k_is_drawn_to_its_end_and_an_empty_one_gives_nothing() -> None:
    logits = jnp.array([MASKED, 0.7, MASKED, -0.2], jnp.float32)
    drawn = np.asarray(draw(jax.random.key(3), logits, 4))
    assert sorted(drawn[:2]) == [1, 3]
    assert (drawn[2:] == NOTHING).all()
    first = by_definition(np.array([0.7, -0.2]), (0,))
    found = log_prob(logits, jnp.array([1, 3, NOTHING, NOTHING], jnp.int32))
    assert float(jnp.exp(found)) == pytest.approx(first, rel=1e-5)  # the second one is certain
    empty = jnp.full(3, MASKED, jnp.float32)
    nothing = draw(jax.random.key(0), empty, 2)
    assert (np.asarray(nothing) == NOTHING).all()
    value, gradient = jax.value_and_grad(log_prob)(empty, nothing)
    assert float(value) == float(entropy(empty)) == 0.0
    assert (np.asarray(gradient) == 0).all()


def test_greedy_takes_the_best_and_of_equal_ones_the_first() -> None:
    logits = jnp.array([[0.1, 2.0, MASKED, 2.0], [MASKED, MASKED, 0.0, MASKED]], jnp.float32)
    best = [[1, 3, 0, NOTHING], [2, NOTHING, NOTHING, NOTHING]]
    for k in (3, 4):
        np.testing.assert_array_equal(greedy(logits, k), np.array(best)[:, :k])


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


def test_scores_are_those_of_a_softmax_though_logits_lie_far_apart() -> None:
    """In blocks of the vocabulary; with the head in parts: tests/learners/test_every_update.py."""
    (hidden, head, tokens), how = setting(), Vocabulary(0.4, numbers=7 * ROWS)
    for scale in (1.0, 300.0):
        rows = scale * hidden
        scores, expected = token_scores(how, rows, head, tokens), plain(0.4, rows, head, tokens)
        for one, other in zip(scores, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * scale)
        found, gradient = (
            jax.grad(lambda *both, score=score: summed(score(*both, tokens)), (0, 1))(rows, head)
            for score in (partial(token_scores, how), partial(plain, 0.4))
        )
        for one, other in zip(found, gradient, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4 * scale)


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


# ------------------------------------------------------------------------ chunks of long documents

STEPS, SIZE, K = 4, 8, 3
TEXTS = 700  # rows of the table, fewer than the chunks: Q-values tie, and the first one is best


class Case(NamedTuple):
    """B documents of unequal length, W states each."""

    kind: str
    table: np.ndarray  # [N, 2D]
    rows: list[np.ndarray]  # of each document, [C]
    counts: np.ndarray  # [B]
    states: np.ndarray  # [B, W, 2D]
    taken: np.ndarray  # [B, W, T]


def case(kind: str, counts: tuple[int, ...], states: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    taken = np.full((len(counts), states, STEPS), -1, np.int32)
    for document, count in enumerate(counts):
        for state in range(states):
            some = rng.choice(count, min(count, int(rng.integers(0, STEPS))), replace=False)
            taken[document, state, : len(some)] = some
    return Case(
        kind=kind,
        table=rng.standard_normal((TEXTS, SIZE)).astype(np.float32),
        rows=[rng.integers(0, TEXTS, count) for count in counts],
        counts=np.array(counts, np.int32),
        states=rng.standard_normal((len(counts), states, SIZE)).astype(np.float32),
        taken=taken,
    )


# Several blocks on several devices; documents that end inside a block and within the first one.
COUNTS = (2500, 1024, 50, 3, 1)
CASES = {
    kind: case(kind, COUNTS, states=2, seed=number)
    for number, kind in enumerate(("none", "absolute", "relative"))
}


def all_q(case: Case, document: int, state: int) -> np.ndarray:
    """Q of every chunk, -inf where it was taken, float64 `[C]`."""
    count = int(case.counts[document])
    taken = [int(i) for i in case.taken[document, state] if i >= 0]
    where = reference.chunk_positions(case.kind, taken, count)
    texts = case.table[case.rows[document]]
    vector = case.states[document, state].astype(np.float64)
    q = np.array([reference.rotated(t, p) @ vector for t, p in zip(texts, where, strict=True)])
    q[taken] = -np.inf
    return q


@pytest.mark.parametrize(
    ("name", "devices"), [*((name, (1, 1)) for name in CASES), ("relative", (2, 4))]
)
def test_best_chunks(name: str, devices: tuple[int, int]) -> None:
    """Positions that are drawn: tests/rollouts/test_beam_search.py."""
    case = CASES[name]
    rows = np.zeros((len(COUNTS), padded_chunks(max(COUNTS), math.prod(devices))), np.int32)
    for row, own in zip(rows, case.rows, strict=True):
        row[: len(own)] = own
    keys = jax.random.split(jax.random.key(3), len(COUNTS))
    compute = make_best_chunks(mesh_of(*devices), case.kind, STEPS, K)
    searches = case.counts, case.states, case.taken, keys
    values, index = jax.device_get(compute(case.table, rows, searches))
    for document, state in np.ndindex(values.shape[:2]):
        q = all_q(case, document, state)
        best = np.argsort(-q, kind="stable")[:K]
        best = best[np.isfinite(q[best])]
        there = len(best)
        np.testing.assert_allclose(values[document, state, :there], q[best], atol=2e-5)
        np.testing.assert_array_equal(values[document, state, there:], np.float32(MASKED))
        assert index[document, state, :there].tolist() == best.tolist()


def test_memory_is_that_of_one_block() -> None:
    """Beside what comes in: as much for 400,000 chunks as for a few blocks of them."""
    best = make_best_chunks(mesh_of(), "relative", STEPS, 2)
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))

    def temporary(chunks: int) -> int:
        shapes = [(5000, SIZE), (1, padded_chunks(chunks, 1)), (1,), (1, 2, SIZE), (1, 2, STEPS)]
        kinds = [np.float32, np.int32, np.int32, np.float32, np.int32]
        table, rows, *of_searches = map(jax.ShapeDtypeStruct, shapes, kinds)
        lowered = best.lower(table, rows, (*of_searches, key))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(4 * BLOCK), temporary(400_000)
    # The rows of the document, four bytes a chunk, may be laid out again; embeddings are not.
    assert many - few <= 2 * 4 * 400_000
    assert few < 2 * 2 * BLOCK * 40 * SIZE * 4

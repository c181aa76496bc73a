"""Log-probabilities and entropies in blocks of the vocabulary, beside those of a plain softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.policies.tokens import TokenScores, Vocabulary, token_scores
from tests.devices import mesh_of

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


@pytest.mark.parametrize(
    ("columns", "temperature", "scale"), [(7, 0.4, 1.0), (1000, 1.0, 1.0), (10, 1.0, 300.0)]
)
def test_it_is_the_softmax(columns: int, temperature: float, scale: float) -> None:
    """Also where logits are far apart."""
    hidden, head, tokens = setting()
    hidden *= scale
    how = Vocabulary(temperature, numbers=columns * ROWS)
    expected = plain(temperature, hidden, head, tokens)
    for one, other in zip(token_scores(how, hidden, head, tokens), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * scale)

    def ours(hidden: Any, head: Any) -> jax.Array:
        return summed(token_scores(how, hidden, head, tokens))

    def theirs(hidden: Any, head: Any) -> jax.Array:
        return summed(plain(temperature, hidden, head, tokens))

    for one, other in zip(
        jax.grad(ours, (0, 1))(hidden, head), jax.grad(theirs, (0, 1))(hidden, head), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4 * scale)


def test_no_array_of_tokens_by_vocabulary() -> None:
    rows, words = 64, 1000
    hidden, head, tokens = setting(rows, words)

    def loss(score: Any, hidden: Any, head: Any) -> jax.Array:
        return summed(score(hidden, head, tokens))

    def blocked(hidden: Any, head: Any, tokens: Any) -> TokenScores:
        return token_scores(Vocabulary(numbers=rows * 50), hidden, head, tokens)

    def program(score: Any) -> Any:
        return jax.jit(jax.grad(lambda *given: loss(score, *given), (0, 1))).lower(hidden, head)

    def whole(hidden: Any, head: Any, tokens: Any) -> TokenScores:
        return plain(1.0, hidden, head, tokens)

    assert f"{rows}x{words}x" in program(whole).as_text()
    assert f"{rows}x{words}x" not in program(blocked).as_text()


def test_a_head_in_parts() -> None:
    """Each of four devices has rows of its own and a quarter of the head."""
    hidden, head, tokens = setting()
    how, mesh = Vocabulary(numbers=30 * 3), mesh_of(fsdp=4)
    rows, part = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), (None, "fsdp")))

    def gradients(hidden: Any, head: Any, tokens: Any, weights: Any) -> Any:
        def loss(hidden: Any, head: Any) -> jax.Array:
            scores = token_scores(how, hidden, head, tokens)
            return (weights * (scores.log_probs + scores.entropy)).sum()

        return jax.grad(loss, (0, 1))(hidden, head)

    weights = jnp.arange(1.0, ROWS + 1)

    def whole(hidden: Any, head: Any) -> jax.Array:
        scores = plain(1.0, hidden, head, tokens)
        return (weights * (scores.log_probs + scores.entropy)).sum()

    found = jax.jit(gradients)(*jax.device_put((hidden, head), (rows, part)), tokens, weights)
    for one, other in zip(found, jax.grad(whole, (0, 1))(hidden, head), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)

"""Log-probabilities and entropies in blocks of the vocabulary, beside those of a plain softmax."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


def test_scores_are_those_of_a_softmax_in_blocks_of_the_vocabulary() -> None:
    check(Vocabulary(0.4, numbers=7 * ROWS))


def test_scores_are_those_of_a_softmax_where_logits_are_far_apart() -> None:
    check(Vocabulary(1.0, numbers=1000 * ROWS), scale=300.0)


def test_scores_are_those_of_a_softmax_where_the_head_is_in_parts() -> None:
    check(Vocabulary(numbers=30 * 3), mesh=mesh_of(fsdp=4))


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

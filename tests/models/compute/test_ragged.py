"""Rows to vectors: pooling by its definition, packed blocks against rows computed one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, first_of_its_kind, pull_back
from qrag_jax.models.heads.embedding import TextEncoder
from tests.episodes_maker import FIRST_WORD, VOCAB, tiny_encoder, tower

ENCODER = tiny_encoder()
PARAMS = tower(ENCODER, 0)
ROWS, WIDTH = 13, 27
LENGTHS = np.array([0, 27, 3, 8, 9, 0, 16, 17, 1, 27, 2, 24, 7], np.int32)
PRESENT = LENGTHS > 0
# Ordinary tokens stand in the padding too: it must not be looked at.
TOKENS = np.random.default_rng(0).integers(FIRST_WORD, VOCAB, (ROWS, WIDTH)).astype(np.int32)
BLOCKS = Blocks((32, 64), (8, 16, 30), (4.0, 12.0, 22.0))
FURTHER_BLOCKS = [
    Blocks((13 * 27,), (27,), (27.0,)),  # one block, of all rows; as wide as the rows
    Blocks((30,), (1, 9, 30), (30.0, 30.0, 30.0)),  # a block holds one or two rows
]

embed = jax.jit(TextEncoder.embed, static_argnums=0)
jitted = jax.jit(embed_rows, static_argnums=(0, 1))
jitted_pull_back = jax.jit(pull_back, static_argnums=(0, 1))


def embedded(tokens: np.ndarray, lengths: np.ndarray, blocks: Blocks = BLOCKS) -> Any:
    return jitted(ENCODER, blocks, PARAMS, TokenRows(tokens, lengths))


def check_gradients(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for leaf, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=1e-5, atol=2e-6 * largest)


@pytest.fixture(scope="module")
def one_by_one() -> np.ndarray:
    rows = zip(np.split(TOKENS, ROWS), np.split(LENGTHS, ROWS), strict=True)
    return np.stack([embed(ENCODER, PARAMS, *row)[0] for row in rows])


# ---------------------------------------------------------------------- one row's vector


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_poolings(pooling: str, normalise: bool) -> None:
    """Of the hidden states of the row alone; a row of no tokens has zeros, and no NaN behind."""
    encoder = dataclasses.replace(ENCODER, pooling=pooling, normalise=normalise, scale=0.5)
    hidden = np.asarray(ENCODER.module.hidden_states(PARAMS, TOKENS, LENGTHS), np.float64)
    of_row = {"mean": lambda h: h.mean(0), "last": lambda h: h[-1], "cls": lambda h: h[0]}[pooling]
    expected = np.stack([of_row(h[:n]) if n else 0 * h[0] for h, n in zip(hidden, LENGTHS)])
    if normalise:
        expected /= np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    found, pull = jax.vjp(jax.jit(lambda p: encoder.embed(p, TOKENS, LENGTHS)), PARAMS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 0.5 * expected, atol=1e-6)
    (gradient,) = pull(jnp.ones_like(found))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


# ---------------------------------------------------------------------- packed into blocks


@pytest.mark.parametrize("blocks", FURTHER_BLOCKS)
def test_equals_the_encoder_row_by_row(blocks: Blocks, one_by_one: np.ndarray) -> None:
    rows = np.asarray(embedded(TOKENS, LENGTHS, blocks)[0])
    assert (rows.shape, rows.dtype) == ((ROWS, ENCODER.width), np.float32)
    np.testing.assert_allclose(rows[PRESENT], one_by_one[PRESENT], atol=2e-6)
    np.testing.assert_array_equal(rows[~PRESENT], 0)


def test_any_lengths_in_any_order_in_one_program(one_by_one: np.ndarray) -> None:
    traces = 0

    @jax.jit
    def program(params: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return embed_rows(ENCODER, BLOCKS, params, TokenRows(tokens, lengths))[0]

    rng = np.random.default_rng(1)
    draws = [rng.integers(0, WIDTH + 1, ROWS) for _ in range(6)]
    draws += [np.zeros(ROWS), np.full(ROWS, WIDTH), np.full(ROWS, 1)]
    for lengths in draws:
        lengths = lengths.astype(np.int32)
        rows = np.asarray(program(PARAMS, TOKENS, lengths))
        expected = np.asarray(embed(ENCODER, PARAMS, TOKENS, lengths))
        np.testing.assert_allclose(rows[lengths > 0], expected[lengths > 0], atol=2e-6)
        np.testing.assert_array_equal(rows[lengths == 0], 0)
    order = rng.permutation(ROWS)
    shuffled = np.asarray(program(PARAMS, TOKENS[order], LENGTHS[order]))
    np.testing.assert_allclose(
        shuffled[PRESENT[order]], one_by_one[order][PRESENT[order]], atol=2e-6
    )
    assert traces == 1


def test_rows_that_occur_twice_are_computed_once() -> None:
    lengths, repeated = np.full(ROWS, 12, np.int32), TOKENS.copy()
    repeated[[4, 7, 9], :12] = TOKENS[2, :12]  # what stands beyond the row may differ
    shorter = lengths.copy()
    shorter[4] = 11  # a beginning is not the same row
    for each, computed in ((lengths, 12 * (ROWS - 3)), (shorter, 12 * (ROWS - 3) + 11)):
        rows, count = embedded(repeated, each)
        assert float(count.real) == computed
        np.testing.assert_allclose(rows, embed(ENCODER, PARAMS, repeated, each), atol=2e-6)


def test_rows_of_equal_hash_are_told_apart_by_their_tokens() -> None:
    odd = 2 * np.random.default_rng(0).integers(2**31, size=3, dtype=np.uint32) + 1
    # a·odd0 + b·odd1 = odd0·odd1 (mod 2³²) for (odd1, 0) and (0, odd0): equal hashes.
    clash = np.array([[odd[1], 0, 7], [0, odd[0], 7], [odd[1], 0, 7]], np.uint32).view(np.int32)
    hashes = (clash.view(np.uint32) * odd).sum(axis=1, dtype=np.uint32)
    assert hashes[0] == hashes[1]
    found = jax.jit(first_of_its_kind)(jnp.asarray(clash), jnp.full(3, 3, jnp.int32))
    assert found.tolist() == [0, 1, 0]


# ---------------------------------------------------------------------- gradients


def test_pull_back_equals_autodiff_and_is_compiled_once() -> None:
    """Of rows of unequal lengths, of rows that occur again, and of none."""
    cotangents = np.random.default_rng(3).standard_normal((ROWS, ENCODER.width)).astype(np.float32)
    repeated = TOKENS.copy()
    repeated[5:9] = TOKENS[1]

    @jax.jit
    def direct(tokens: jax.Array, lengths: jax.Array) -> Any:
        def total(params: Any) -> jax.Array:
            vectors = ENCODER.embed(params, tokens, lengths)
            return jnp.where((lengths > 0)[:, None], cotangents * vectors, 0).sum()

        return jax.grad(total)(PARAMS)

    programs = jitted_pull_back._cache_size()
    of_nines, of_none = np.full(ROWS, 9, np.int32), np.zeros(ROWS, np.int32)
    for tokens, lengths in ((TOKENS, LENGTHS), (repeated, of_nines), (TOKENS, of_none)):
        rows = TokenRows(tokens, lengths)
        found, count = jitted_pull_back(ENCODER, BLOCKS, PARAMS, rows, cotangents)
        check_gradients(found, direct(tokens, lengths))
        if tokens is repeated:
            assert float(count.real) == 9 * (ROWS - 4)
    assert jitted_pull_back._cache_size() == programs + 1

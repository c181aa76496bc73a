"""Packed blocks against the encoder applied to one row at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import (
    CotangentsOf,
    TokenRows,
    embed_and_pull_back,
    embed_rows,
    first_of_its_kind,
    pull_back,
)
from tests.episodes_maker import FIRST_WORD, VOCAB, tiny_encoder, tower

ENCODER = tiny_encoder()
ROWS, WIDTH = 13, 27
LENGTHS = np.array([0, 27, 3, 8, 9, 0, 16, 17, 1, 27, 2, 24, 7], np.int32)
EVERY_BLOCKS = [
    Blocks((32, 64), (8, 16, 30), (4.0, 12.0, 22.0)),
    Blocks((13 * 27,), (27,), (27.0,)),  # one block, of all rows; as wide as the rows
    Blocks((30,), (1, 9, 30), (30.0, 30.0, 30.0)),  # a block holds one or two rows
]


@pytest.fixture(scope="module")
def params():
    return tower(ENCODER, 0)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    # Ordinary tokens stand in the padding too: it must not be looked at.
    return np.random.default_rng(0).integers(FIRST_WORD, VOCAB, (ROWS, WIDTH)).astype(np.int32)


@pytest.fixture(scope="module")
def one_by_one(params, tokens) -> np.ndarray:
    embed = jax.jit(ENCODER.embed)
    return np.stack([embed(params, tokens[i : i + 1], LENGTHS[i : i + 1])[0] for i in range(ROWS)])


jitted = jax.jit(embed_rows, static_argnums=(0, 1))
jitted_pull_back = jax.jit(pull_back, static_argnums=(0, 1))


@pytest.mark.parametrize("blocks", EVERY_BLOCKS)
def test_equals_the_encoder_row_by_row(blocks, params, tokens, one_by_one) -> None:
    rows = np.asarray(jitted(ENCODER, blocks, params, TokenRows(tokens, LENGTHS))[0])
    assert rows.shape == (ROWS, ENCODER.width)
    assert rows.dtype == np.float32
    present = LENGTHS > 0
    np.testing.assert_allclose(rows[present], one_by_one[present], atol=2e-6)
    assert np.isfinite(rows).all()


def test_a_program_with_64_bits_gets_the_same(params, tokens, one_by_one) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        rows = jitted(ENCODER, EVERY_BLOCKS[0], params, TokenRows(tokens, LENGTHS))[0]
    np.testing.assert_allclose(rows[LENGTHS > 0], one_by_one[LENGTHS > 0], atol=2e-6)


@pytest.mark.parametrize("blocks", EVERY_BLOCKS)
def test_absent_rows_give_zeros(blocks, params, tokens) -> None:
    rows = np.asarray(jitted(ENCODER, blocks, params, TokenRows(tokens, LENGTHS))[0])
    np.testing.assert_array_equal(rows[LENGTHS == 0], 0)


def test_random_lengths_in_one_program(params, tokens) -> None:
    traces = 0

    def embed_and_count(params, tokens, lengths):
        nonlocal traces
        traces += 1
        return embed_rows(ENCODER, EVERY_BLOCKS[0], params, TokenRows(tokens, lengths))[0]

    program, direct = jax.jit(embed_and_count), jax.jit(ENCODER.embed)
    rng = np.random.default_rng(1)
    draws = [rng.integers(0, WIDTH + 1, ROWS) for _ in range(6)]
    draws += [np.zeros(ROWS), np.full(ROWS, WIDTH), np.full(ROWS, 1)]
    for lengths in draws:
        lengths = lengths.astype(np.int32)
        rows = np.asarray(program(params, tokens, lengths))
        expected = np.asarray(direct(params, tokens, lengths))
        np.testing.assert_allclose(rows[lengths > 0], expected[lengths > 0], atol=2e-6)
        if not lengths.any():
            np.testing.assert_array_equal(rows, 0)
    assert traces == 1
    assert program._cache_size() == 1


def test_a_row_does_not_depend_on_the_order_of_rows(params, tokens) -> None:
    blocks, order = EVERY_BLOCKS[0], np.random.default_rng(2).permutation(ROWS)
    rows = np.asarray(jitted(ENCODER, blocks, params, TokenRows(tokens, LENGTHS))[0])
    shuffled = np.asarray(
        jitted(ENCODER, blocks, params, TokenRows(tokens[order], LENGTHS[order]))[0]
    )
    present = LENGTHS[order] > 0
    np.testing.assert_allclose(shuffled[present], rows[order][present], atol=2e-6)


@pytest.fixture(scope="module")
def direct_gradient(params, tokens):
    cotangents = np.random.default_rng(3).standard_normal((ROWS, ENCODER.width))
    cotangents = cotangents.astype(np.float32)

    def total(params):
        present = jnp.asarray(LENGTHS > 0)[:, None]
        return jnp.where(present, cotangents * ENCODER.embed(params, tokens, LENGTHS), 0).sum()

    return cotangents, jax.jit(jax.grad(total))(params)


@pytest.mark.parametrize("blocks", EVERY_BLOCKS[:2])
def test_pull_back_equals_autodiff(blocks, params, tokens, direct_gradient) -> None:
    cotangents, expected = direct_gradient
    found, _ = jitted_pull_back(ENCODER, blocks, params, TokenRows(tokens, LENGTHS), cotangents)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for leaf, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=1e-5, atol=1e-6 * largest)
    # A second draw of lengths runs in the same program.
    programs = jitted_pull_back._cache_size()
    jitted_pull_back(ENCODER, blocks, params, TokenRows(tokens, LENGTHS[::-1].copy()), cotangents)
    assert jitted_pull_back._cache_size() == programs


def test_cotangents_that_follow_from_the_embeddings(params, tokens) -> None:
    """The gradient of `Σ_n w_n·|embedding_n|²`, rows that occur twice included."""
    twice = np.concatenate([tokens, tokens[3:6]])
    lengths = np.concatenate([LENGTHS, LENGTHS[3:6]])
    weights = np.linspace(-1, 2, len(twice)).astype(np.float32)

    @jax.jit
    def found(params, tokens, lengths):
        def cotangent_of(embedded, values):
            number, weight = values
            assert number.shape == weight.shape == embedded.shape[:1]
            return jnp.where(number[:, None] > 0, 2 * weight[:, None] * embedded, 0)

        of_rows = jnp.arange(1, 1 + len(weights)), jnp.asarray(weights)  # no row: zeros
        rows, cotangents = TokenRows(tokens, lengths), CotangentsOf(cotangent_of, of_rows)
        return embed_and_pull_back(ENCODER, EVERY_BLOCKS[0], params, rows, cotangents)

    def whole(params):
        embedded = ENCODER.embed(params, twice, lengths)
        return (jnp.asarray(weights)[:, None] * embedded**2).sum(), embedded

    gradient, embedded, count = found(params, twice, lengths)
    expected, direct = jax.jit(jax.grad(whole, has_aux=True))(params)
    np.testing.assert_allclose(embedded, direct, atol=2e-6)
    assert float(count.real) == lengths.sum()
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * max(1.0, np.abs(other).max()))


def test_pull_back_of_absent_rows_is_zero(params, tokens) -> None:
    cotangents = np.ones((ROWS, ENCODER.width), np.float32)
    lengths = np.zeros(ROWS, np.int32)
    nothing, _ = jitted_pull_back(
        ENCODER, EVERY_BLOCKS[0], params, TokenRows(tokens, lengths), cotangents
    )
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(nothing))


def test_counts_the_tokens_of_the_blocks(params, tokens) -> None:
    shape = Blocks((27,), (27,), (20.0,))  # a block holds 27 tokens, of two rows at most
    lengths = np.array([27, 20, 14, 9, 4, 0, 0, 0, 0, 0, 0, 0, 0], np.int32)
    _, count = jitted(ENCODER, shape, params, TokenRows(tokens, lengths))
    # 27; 20 + 4; 14 + 9
    assert (float(count.real), float(count.computed)) == (74, 3 * 27)
    assert count.real.dtype == count.computed.dtype == jnp.float32


def test_rows_that_occur_twice_are_computed_once(params, tokens) -> None:
    blocks, lengths = EVERY_BLOCKS[0], np.full(ROWS, 12, np.int32)
    repeated = tokens.copy()
    repeated[[4, 7, 9], :12] = tokens[2, :12]  # what stands beyond the row may differ
    rows, count = jitted(ENCODER, blocks, params, TokenRows(repeated, lengths))
    assert float(count.real) == 12 * (ROWS - 3)
    np.testing.assert_allclose(rows, jax.jit(ENCODER.embed)(params, repeated, lengths), atol=2e-6)
    # A beginning is not the same row.
    shorter = lengths.copy()
    shorter[4] = 11
    rows, count = jitted(ENCODER, blocks, params, TokenRows(repeated, shorter))
    assert float(count.real) == 12 * (ROWS - 3) + 11
    np.testing.assert_allclose(rows, jax.jit(ENCODER.embed)(params, repeated, shorter), atol=2e-6)


def test_rows_of_equal_hash_are_told_apart_by_their_tokens() -> None:
    odd = 2 * np.random.default_rng(0).integers(2**31, size=3, dtype=np.uint32) + 1
    # a·odd0 + b·odd1 = odd0·odd1 (mod 2³²) for (odd1, 0) and (0, odd0): equal hashes.
    clash = np.array([[odd[1], 0, 7], [0, odd[0], 7], [odd[1], 0, 7]], np.uint32).view(np.int32)
    hashes = (clash.view(np.uint32) * odd).sum(axis=1, dtype=np.uint32)
    assert hashes[0] == hashes[1]
    found = first_of_its_kind(jnp.asarray(clash), jnp.full(3, 3, jnp.int32))
    assert found.tolist() == [0, 1, 0]


def test_pull_back_of_repeated_rows_equals_autodiff(params, tokens) -> None:
    repeated, lengths = tokens.copy(), np.full(ROWS, 9, np.int32)
    repeated[5:9] = tokens[1]
    cotangents = np.random.default_rng(5).standard_normal((ROWS, ENCODER.width)).astype(np.float32)
    found, count = jitted_pull_back(
        ENCODER, EVERY_BLOCKS[0], params, TokenRows(repeated, lengths), cotangents
    )
    assert float(count.real) == 9 * (ROWS - 4)

    def total(params):
        return (cotangents * ENCODER.embed(params, repeated, lengths)).sum()

    expected = jax.jit(jax.grad(total))(params)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for leaf, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=1e-5, atol=1e-6 * largest)


def test_rows_wider_than_the_largest_bucket_are_refused(params, tokens) -> None:
    with pytest.raises(ValueError, match="27 tokens exceed the lengths"):
        embed_rows(ENCODER, Blocks((32,), (8, 26), (8.0, 20.0)), params, TokenRows(tokens, LENGTHS))
    cotangents = np.zeros((ROWS, ENCODER.width), np.float32)
    with pytest.raises(ValueError, match="27 tokens exceed the lengths"):
        pull_back(
            ENCODER,
            Blocks((32,), (8, 26), (8.0, 20.0)),
            params,
            TokenRows(tokens, LENGTHS),
            cotangents,
        )


def test_places_are_written_once(params, tokens) -> None:
    """A GPU that adds in a fixed order sorts what it writes unless it is told so."""
    rows = TokenRows(tokens, jnp.asarray(LENGTHS))
    program = jax.make_jaxpr(lambda own: embed_rows(ENCODER, EVERY_BLOCKS[0], own, rows))(params)
    written = str(program).split(" scatter[")[1:]
    assert written
    assert all("unique_indices=True" in one.split("] ")[0] for one in written)

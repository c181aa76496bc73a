"""Length-sorted blocks against the encoder applied to one row at a time."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.encoders.ragged import Blocks, choose_lengths, count_tokens, embed_rows, pull_back
from tests.episodes_maker import FIRST_WORD, VOCAB, tiny_encoder, tower

ENCODER = tiny_encoder()
ROWS, WIDTH = 13, 27
LENGTHS = np.array([0, 27, 3, 8, 9, 0, 16, 17, 1, 27, 2, 24, 7], np.int32)
EVERY_BLOCKS = [
    Blocks(4, (8, 16, 30)),  # 13 rows do not fill four blocks
    Blocks(64, (27,)),  # one block, of all rows; one bucket, as wide as the rows
    Blocks(1, (1, 9, 30)),  # a block a row
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
    rows = np.asarray(jitted(ENCODER, blocks, params, tokens, LENGTHS))
    assert rows.shape == (ROWS, ENCODER.width)
    assert rows.dtype == np.float32
    present = LENGTHS > 0
    np.testing.assert_allclose(rows[present], one_by_one[present], atol=2e-6)
    assert np.isfinite(rows).all()


@pytest.mark.parametrize("blocks", EVERY_BLOCKS)
def test_absent_rows_give_zeros(blocks, params, tokens) -> None:
    rows = np.asarray(jitted(ENCODER, blocks, params, tokens, LENGTHS))
    np.testing.assert_array_equal(rows[LENGTHS == 0], 0)


def test_random_lengths_in_one_program(params, tokens) -> None:
    traces = 0

    def embed_and_count(params, tokens, lengths):
        nonlocal traces
        traces += 1
        return embed_rows(ENCODER, Blocks(4, (8, 16, 30)), params, tokens, lengths)

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
    rows = np.asarray(jitted(ENCODER, blocks, params, tokens, LENGTHS))
    shuffled = np.asarray(jitted(ENCODER, blocks, params, tokens[order], LENGTHS[order]))
    present = LENGTHS[order] > 0
    np.testing.assert_allclose(shuffled[present], rows[order][present], atol=2e-6)


@pytest.fixture(scope="module")
def direct_gradient(params, tokens):
    cotangents = np.random.default_rng(3).standard_normal((ROWS, ENCODER.width))
    cotangents = cotangents.astype(np.float32)

    def total(params):
        present = jnp.asarray(LENGTHS > 0)[:, None]
        return (cotangents * present * ENCODER.embed(params, tokens, LENGTHS)).sum()

    return cotangents, jax.jit(jax.grad(total))(params)


@pytest.mark.parametrize("blocks", EVERY_BLOCKS[:2])
def test_pull_back_equals_autodiff(blocks, params, tokens, direct_gradient) -> None:
    cotangents, expected = direct_gradient
    found = jitted_pull_back(ENCODER, blocks, params, tokens, LENGTHS, cotangents)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for leaf, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=1e-5, atol=1e-6 * largest)
    # A second draw of lengths runs in the same program.
    programs = jitted_pull_back._cache_size()
    jitted_pull_back(ENCODER, blocks, params, tokens, LENGTHS[::-1].copy(), cotangents)
    assert jitted_pull_back._cache_size() == programs


def test_pull_back_of_absent_rows_is_zero(params, tokens) -> None:
    cotangents = np.ones((ROWS, ENCODER.width), np.float32)
    lengths = np.zeros(ROWS, np.int32)
    nothing = jitted_pull_back(ENCODER, EVERY_BLOCKS[0], params, tokens, lengths, cotangents)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(nothing))


def counted_by_hand(blocks: Blocks, lengths: np.ndarray) -> tuple[int, int]:
    size, computed = min(blocks.size, len(lengths)), 0
    longest_first = sorted(map(int, lengths), reverse=True)
    for start in range(0, len(lengths), size):
        longest = longest_first[start]  # blocks are filled from the longest row down
        if longest:
            computed += size * next(bucket for bucket in blocks.lengths if bucket >= longest)
    return int(lengths.sum()), computed


@pytest.mark.parametrize("blocks", EVERY_BLOCKS)
def test_count_tokens(blocks) -> None:
    rng = np.random.default_rng(4)
    for count in (1, 5, 13, 16):
        for _ in range(4):
            lengths = rng.integers(0, 28, count).astype(np.int32)
            found = count_tokens(blocks, jnp.asarray(lengths))
            assert (float(found.real), float(found.computed)) == counted_by_hand(blocks, lengths)
            assert found.real.dtype == found.computed.dtype == jnp.float32


def test_rows_wider_than_the_largest_bucket_are_refused(params, tokens) -> None:
    with pytest.raises(ValueError, match="27 tokens exceed the buckets"):
        embed_rows(ENCODER, Blocks(4, (8, 26)), params, tokens, LENGTHS)
    cotangents = np.zeros((ROWS, ENCODER.width), np.float32)
    with pytest.raises(ValueError, match="27 tokens exceed the buckets"):
        pull_back(ENCODER, Blocks(4, (8, 26)), params, tokens, LENGTHS, cotangents)


def cost(histogram: np.ndarray, lengths: tuple[int, ...]) -> int:
    """Tokens computed when every row is padded to its bucket; an absent row costs nothing."""
    rows = [(n, int(count)) for n, count in enumerate(histogram) if n]
    return sum(count * min(x for x in lengths if x >= n) for n, count in rows)


def cheapest(histogram: np.ndarray, count: int) -> int:
    """The least cost of all sets of at most `count` multiples of 8, the longest row included."""
    longest = len(histogram) - 1
    inner = range(8, longest, 8)
    sets = itertools.chain.from_iterable(
        itertools.combinations(inner, size) for size in range(min(count, len(inner) + 1))
    )
    return min(cost(histogram, (*chosen, longest)) for chosen in sets)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20])
def test_choose_lengths_is_optimal(count) -> None:
    rng = np.random.default_rng(count)
    for longest in (3, 8, 9, 30, 41, 56):
        for _ in range(4):
            histogram = np.concatenate([[0], rng.integers(0, 50, longest) ** 2])
            lengths = choose_lengths(histogram, count)
            assert len(lengths) <= count
            assert lengths == tuple(sorted(set(lengths)))
            assert lengths[-1] == longest
            assert all(length % 8 == 0 for length in lengths[:-1])
            assert cost(histogram, lengths) == cheapest(histogram, count)


def test_choose_lengths_does_not_pay_for_rows_of_no_tokens() -> None:
    histogram = np.zeros(41, np.int64)
    histogram[0], histogram[20], histogram[40] = 1000, 10, 10
    assert choose_lengths(histogram, 2) == (24, 40)

"""Rows packed into blocks, and rows that share tokens, beside the same rows computed one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.packing import Blocks, choose_blocks
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, first_of_its_kind, pull_back
from qrag_jax.models.compute.sharing import RowLengths, shared_layout
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.trunks.qwen3 import Qwen3Config
from qrag_jax.models.trunks.transformer import WORDS, Transformer
from tests.episodes_maker import FIRST_WORD, VOCAB, tiny_encoder, tower
from tests.support.parity import check_gradients


def test_blocks_hold_the_longest_row_and_grow_by_doubling() -> None:
    histogram = np.zeros(41, np.int64)
    histogram[[5, 7, 20, 40]] = 30, 10, 4, 1
    blocks = choose_blocks(histogram, tokens=160, lengths=2, sizes=3)
    assert (blocks.tokens, blocks.lengths) == ((40, 80, 160), (8, 40))
    np.testing.assert_allclose(blocks.mean_lengths, (5.5, 24.0))
    # Two of the longest rows fit even where fewer tokens are asked for.
    assert choose_blocks(histogram, tokens=16, lengths=2, sizes=2).tokens == (40, 80)
    assert choose_blocks(histogram, tokens=80, lengths=1, sizes=4).tokens == (40, 80)


# ---------------------------------------------------------------------- packed rows

ENCODER = tiny_encoder()
PARAMS = tower(ENCODER, 0)
ROWS, WIDTH = 13, 27
LENGTHS = np.array([0, 27, 3, 8, 9, 0, 16, 17, 1, 27, 2, 24, 7], np.int32)
# Ordinary tokens stand in the padding too: it must not be looked at.
TOKENS = np.random.default_rng(0).integers(FIRST_WORD, VOCAB, (ROWS, WIDTH)).astype(np.int32)
BLOCKS = Blocks((32, 64), (8, 16, 30), (4.0, 12.0, 22.0))
WHOLE, FEW = Blocks((13 * 27,), (27,), (27.0,)), Blocks((30,), (1, 9, 30), (30.0, 30.0, 30.0))
embed = jax.jit(TextEncoder.embed, static_argnums=0)
embedded = jax.jit(embed_rows, static_argnums=(0, 1))
jitted_pull_back = jax.jit(pull_back, static_argnums=(0, 1))


def test_rows_of_no_tokens_have_zeros_and_no_nan_behind() -> None:
    """Poolings beside the library's: tests/models/files/test_sentence_transformers.py."""
    encoder = dataclasses.replace(ENCODER, pooling="mean", normalise=True, scale=1.0)
    found, pull = jax.vjp(jax.jit(lambda p: encoder.embed(p, TOKENS, LENGTHS)), PARAMS)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), LENGTHS > 0, atol=1e-5)
    (gradient,) = pull(jnp.ones_like(found))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


def test_any_lengths_in_any_order_in_one_program() -> None:
    rng, programs = np.random.default_rng(1), embedded._cache_size()
    draws = [rng.integers(0, WIDTH + 1, ROWS) for _ in range(6)]
    for lengths in (LENGTHS, *draws, np.zeros(ROWS), np.full(ROWS, WIDTH), np.full(ROWS, 1)):
        lengths = lengths.astype(np.int32)
        order = rng.permutation(ROWS)
        rows = TokenRows(TOKENS[order], lengths[order])
        expected = np.asarray(embed(ENCODER, PARAMS, TOKENS, lengths))[order]
        found = np.asarray(embedded(ENCODER, BLOCKS, PARAMS, rows)[0])
        np.testing.assert_allclose(found, expected, atol=2e-6)
        np.testing.assert_array_equal(found[lengths[order] == 0], 0)
    assert embedded._cache_size() <= programs + 1


@pytest.mark.parametrize("blocks", [WHOLE, FEW])
def test_blocks_of_one_row_and_of_all_rows(blocks: Blocks) -> None:
    found = np.asarray(embedded(ENCODER, blocks, PARAMS, TokenRows(TOKENS, LENGTHS))[0])
    np.testing.assert_allclose(found, embed(ENCODER, PARAMS, TOKENS, LENGTHS), atol=2e-6)


def test_rows_that_occur_twice_are_computed_once() -> None:
    lengths, repeated = np.full(ROWS, 12, np.int32), TOKENS.copy()
    repeated[[4, 7, 9], :12] = TOKENS[2, :12]  # what stands beyond the row may differ
    shorter = lengths.copy()
    shorter[4] = 11  # a beginning is not the same row
    for each, computed in ((lengths, 12 * (ROWS - 3)), (shorter, 12 * (ROWS - 3) + 11)):
        rows, count = embedded(ENCODER, BLOCKS, PARAMS, TokenRows(repeated, each))
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


def test_pull_back_is_autodiffs_gradient_in_one_program() -> None:
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
    for tokens, lengths in ((TOKENS, LENGTHS), (repeated, of_nines)):
        rows = TokenRows(tokens, lengths)
        found, count = jitted_pull_back(ENCODER, BLOCKS, PARAMS, rows, cotangents)
        check_gradients(*jax.tree.map(np.asarray, (found, direct(tokens, lengths))))
        if tokens is repeated:
            assert float(count.real) == 9 * (ROWS - 4)
    nothing, _ = jitted_pull_back(ENCODER, BLOCKS, PARAMS, TokenRows(TOKENS, of_none), cotangents)
    assert not any(leaf.any() for leaf in jax.tree.leaves(nothing))
    assert jitted_pull_back._cache_size() <= programs + 1


# ---------------------------------------------------------------------- rows that share tokens

MEMBERS, LONGEST, PLACES = 3, 9, 40
SHARED = np.array([4, 2, 5, 0], np.int32)  # the third group has no row
OF_ROWS = np.array([6, 0, 9, 5, 3, 2, 0, 0, 0, 4, 1, 3], np.int32)


def places_by_hand() -> dict[tuple[int, int], int]:
    """(row, position) → the token's place, in the order of the places."""
    found: dict[tuple[int, int], int] = {}
    place = 0
    for group, shared in enumerate(SHARED):
        rows = [row for row in range(MEMBERS * group, MEMBERS * (group + 1)) if OF_ROWS[row]]
        for position in range(shared if rows else 0):
            found |= {(row, position): place for row in rows}
            place += 1
        for row in rows:
            for position in range(shared, OF_ROWS[row]):
                found[row, position] = place
                place += 1
    return found


@pytest.mark.parametrize(
    ("scanned", "longest"),
    [(False, RowLengths(LONGEST)), (True, RowLengths(LONGEST, 6, 7))],
    ids=["whole rows", "in parts, scanned layers"],
)
def test_a_causal_model_computes_the_same(scanned: bool, longest: RowLengths) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    trunk = Transformer(
        Qwen3Config(50, 16, **sizes, intermediate_size=24, head_dim=8), scanned=scanned
    )
    params, draw = trunk.init_params(jax.random.key(0)), np.random.default_rng(1)
    tokens = draw.integers(0, 50, (len(OF_ROWS), LONGEST))
    for row in range(len(OF_ROWS)):
        group = row // MEMBERS
        tokens[row, : SHARED[group]] = tokens[MEMBERS * group, : SHARED[group]]
    expected = places_by_hand()
    packed = np.zeros(PLACES, np.int32)
    for (row, position), place in expected.items():
        packed[place] = tokens[row, position]
    weights = draw.normal(size=(len(OF_ROWS), LONGEST, 16)).astype(np.float32)
    # The loss is of what rows have alone, and of a group's common tokens once.
    in_common = np.arange(LONGEST)[None] < np.repeat(SHARED, MEMBERS)[:, None]
    first = np.arange(len(OF_ROWS)) % MEMBERS == 0
    counted = (np.arange(LONGEST)[None] < OF_ROWS[:, None]) & (~in_common | first[:, None])
    weights *= counted[..., None]

    def shared(params: Any) -> jax.Array:
        layout = shared_layout(jnp.asarray(SHARED), jnp.asarray(OF_ROWS), PLACES, longest)
        prepared = trunk.prepare(params)
        hidden = trunk.apply({"params": prepared}, prepared[WORDS][packed], layout)
        of_places = np.zeros((PLACES, 16), np.float32)
        for (row, position), place in expected.items():
            of_places[place] += weights[row, position]
        return (hidden * of_places).sum()

    def alone(params: Any) -> jax.Array:
        hidden = trunk.hidden_states(params, jnp.asarray(tokens), jnp.asarray(OF_ROWS))
        return (hidden * weights).sum()

    one, other = (jax.jit(jax.value_and_grad(each))(params) for each in (shared, alone))
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6 * float(np.abs(theirs).max()))

"""The pooled embedding against a mean over the hidden states in NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.precision import Precision
from tests.episodes_maker import FIRST_WORD, VOCAB, tiny_encoder, tower

ENCODER = tiny_encoder()
HALF = jnp.dtype(jnp.bfloat16)


@pytest.fixture(scope="module")
def params():
    return tower(ENCODER, 1)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(FIRST_WORD, VOCAB, (5, 11)).astype(np.int32)
    return tokens, np.array([11, 1, 6, 2, 9], np.int32)


def test_is_the_scaled_mean_of_the_hidden_states_inside_the_row(params, rows) -> None:
    tokens, lengths = rows
    embedded = np.asarray(jax.jit(ENCODER.embed)(params, tokens, lengths))
    hidden = np.asarray(jax.jit(ENCODER.module.hidden_states)(params, tokens, lengths))
    expected = [0.1 * h[:n].astype(np.float64).mean(0) for h, n in zip(hidden, lengths)]
    np.testing.assert_allclose(embedded, expected, atol=1e-6)
    assert embedded.dtype == np.float32


def test_what_stands_in_the_padding_changes_nothing(params, rows) -> None:
    tokens, lengths = rows
    blank = np.where(np.arange(11) < lengths[:, None], tokens, ENCODER.pad_id).astype(np.int32)
    embed = jax.jit(ENCODER.embed)
    np.testing.assert_array_equal(embed(params, tokens, lengths), embed(params, blank, lengths))


def test_how_wide_the_padding_is_changes_nothing(params, rows) -> None:
    tokens, _ = rows
    length = np.array([6], np.int32)
    bare = ENCODER.embed(params, tokens[:1, :6], length)
    np.testing.assert_allclose(ENCODER.embed(params, tokens[:1], length), bare, atol=1e-6)


def test_a_row_of_no_tokens_gives_zeros_and_leaves_the_others_alone(params, rows) -> None:
    tokens, lengths = rows
    embed = jax.jit(ENCODER.embed)
    without = np.where(np.arange(5) == 2, 0, lengths).astype(np.int32)
    embedded, usual = embed(params, tokens, without), embed(params, tokens, lengths)
    np.testing.assert_array_equal(embedded[2], 0)
    np.testing.assert_allclose(np.delete(embedded, 2, 0), np.delete(usual, 2, 0), atol=1e-6)


def test_scale(params, rows) -> None:
    unscaled = dataclasses.replace(ENCODER, scale=1.0)
    np.testing.assert_allclose(
        0.1 * unscaled.embed(params, *rows), ENCODER.embed(params, *rows), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize(
    "precision", [Precision(HALF, HALF), Precision(jnp.dtype(jnp.float32), HALF)]
)
def test_bfloat16_gives_float32_embeddings(precision, params, rows) -> None:
    half = tiny_encoder(precision=precision)
    embedded = jax.jit(half.embed)(params, *rows)
    assert embedded.dtype == jnp.float32
    expected = np.asarray(ENCODER.embed(params, *rows))
    np.testing.assert_allclose(embedded, expected, atol=0.05 * np.abs(expected).max())


def test_init_is_decided_by_its_key() -> None:
    init = jax.jit(ENCODER.init)
    first, again, other = (init(jax.random.key(seed)) for seed in (3, 3, 4))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, again))
    kernels = (p["layers"]["query"]["kernel"] for p in (first, other))
    assert not np.array_equal(*kernels)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_poolings(pooling, normalise, params, rows) -> None:
    tokens, lengths = rows
    lengths = np.where(np.arange(5) == 2, 0, lengths).astype(np.int32)
    encoder = dataclasses.replace(ENCODER, pooling=pooling, normalise=normalise, scale=0.5)
    hidden = np.asarray(ENCODER.module.hidden_states(params, tokens, lengths), np.float64)
    of_row = {"mean": lambda h: h.mean(0), "last": lambda h: h[-1], "cls": lambda h: h[0]}[pooling]
    expected = np.stack([of_row(h[:n]) if n else 0 * h[0] for h, n in zip(hidden, lengths)])
    if normalise:
        expected /= np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    embedded, pull = jax.vjp(jax.jit(lambda p: encoder.embed(p, tokens, lengths)), params)
    np.testing.assert_allclose(embedded, 0.5 * expected, atol=1e-6)
    (gradient,) = pull(jnp.ones_like(embedded))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


def test_what_rows_open_with() -> None:
    encoder = dataclasses.replace(ENCODER, state_prefix=(7, 8), chunk_prefix=(9,))
    assert encoder.state_opening == (ENCODER.opening_id, 7, 8)
    assert encoder.chunk_opening == (ENCODER.opening_id, 9)
    assert dataclasses.replace(encoder, opening_id=None).state_opening == (7, 8)
    assert dataclasses.replace(ENCODER, opening_id=None).chunk_opening == ()

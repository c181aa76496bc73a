"""Linear maps, rotations, sums and blocks of rows by their definitions; attention as GPUs have it.

Attention in whole models, next to Hugging Face's: tests/conformance/test_encoders.py. Gradients of
packed rows: tests/learners/test_pqn.py; of rows that share tokens: tests/learners, of tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.compute.attention import causal_attention, padded_attention, rotate
from qrag_jax.models.compute.dropout import MULTIPLIER, row_digests
from qrag_jax.models.compute.lora import linear
from qrag_jax.models.compute.packing import Blocks, _sorted_sums, add_rows, choose_blocks, take_rows
from qrag_jax.models.compute.precision import Precision, precision
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, first_of_its_kind
from qrag_jax.runtime.platform import Platform
from tests import reference
from tests.episodes_maker import FIRST_WORD, VOCAB, tiny_encoder, tower
from tests.reference import rotated
from tests.support.hlo import nondeterministic

# ---------------------------------------------------------------------- attention

FULL, HALF = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def test_names_of_precisions() -> None:
    cpu, tpu = Platform("cpu"), Platform("tpu")
    hopper, volta = Platform("gpu", (9, 0)), Platform("gpu", (7, 0))
    for name, platform, activations, expected in (
        ("bfloat16", cpu, "auto", (FULL, HALF, "products")),
        ("auto", hopper, "auto", (HALF, HALF, "fused")),
        ("auto", hopper, "float32", (FULL, HALF, "products")),
        ("auto", volta, "auto", (FULL, FULL, "products")),
        ("auto", tpu, "auto", (HALF, HALF, "products")),
    ):
        assert precision(name, platform, activations) == Precision(*expected)
    for name, platform, activations, field in (
        ("float32", hopper, "bfloat16", "activations"),
        ("bfloat16", volta, "auto", "dtype"),
    ):
        with pytest.raises(InputError, match=rf"config\.encoder\.{field}"):
            precision(name, platform, activations)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX checks and lowers for cuDNN where there is none."""
    lowering = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(lowering, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(lowering, "check_compute_capability", lambda capability: True)


def lowered_for_gpu(length: int, width: int, attention: Any = padded_attention) -> str:
    """The gradient of attention as it is lowered for an NVIDIA GPU; raises what its checks say."""
    heads = jax.ShapeDtypeStruct((4, length, 4, width), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)

    def total(query, key, value, lengths):
        half = precision("bfloat16", Platform("gpu", (9, 0)))
        return attention(query, key, value, lengths, half).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(heads, heads, heads, lengths)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("width", "attention"), [(32, padded_attention), (128, causal_attention)])
def test_rows_of_the_default_config_take_the_fused_kernel_of_gpus(cudnn, width, attention) -> None:
    """Its longest state has 287 tokens: cuDNN refuses a gradient of rows of an odd length."""
    rows = np.bincount([287, 180, 90], minlength=288)
    for length in choose_blocks(rows, 8192, 2, 2, multiples=(64, 8)).lengths:
        assert "__cudnn$fmhaSoftmaxBackward" in lowered_for_gpu(length, width, attention)


@pytest.mark.parametrize("asked", [True, False])
def test_each_gradient_says_itself_that_it_is_deterministic(cudnn, monkeypatch, asked) -> None:
    """XLA would write it into the first of equal calls alone, and find no kernel for the others."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_deterministic_ops={str(asked).lower()}")
    calls = [line for line in lowered_for_gpu(288, 64).splitlines() if "__cudnn$fmha" in line]
    assert ["fmhaSoftmaxBackward" in line for line in calls].count(True) == 1
    for line in calls:
        assert ("force_deterministic" in line) == (asked and "fmhaSoftmaxBackward" in line)


# ---------------------------------------------------------------------- linear maps, rotations


def test_half_precision_inputs_give_float32_gradients_of_float32_parameters() -> None:
    rng = np.random.default_rng(0)
    shapes = ((2, 5, 6), (6, 4), (4,), (2, 5, 4))
    x, kernel, bias, gradient = (jnp.asarray(rng.normal(size=s), np.float32) for s in shapes)
    half, gradient = x.astype(jnp.bfloat16), gradient.astype(jnp.bfloat16)
    result, pull = jax.vjp(partial(linear, jnp.bfloat16), half, kernel, bias)
    d_x, d_kernel, d_bias = pull(gradient)
    assert result.dtype == d_x.dtype == jnp.bfloat16
    assert d_kernel.dtype == d_bias.dtype == jnp.float32
    # Summed in float32: exact for the rounded inputs.
    exact = np.einsum("abi,abo->io", np.asarray(half, np.float64), np.asarray(gradient, np.float64))
    np.testing.assert_allclose(d_kernel, exact, atol=1e-5)


def test_halves_are_rotated_by_the_definition() -> None:
    positions = [0, 139, 1024, 399_999]
    embeddings = np.random.default_rng(0).normal(size=(4, 24)).astype(np.float32)
    found, pull = jax.vjp(
        lambda e: rotate(e, jnp.asarray(positions), max(positions)), jnp.asarray(embeddings)
    )
    expected = [rotated(e, p) for e, p in zip(embeddings, positions, strict=True)]
    np.testing.assert_allclose(found, expected, atol=3e-6)
    np.testing.assert_array_equal(found[0], embeddings[0])  # position 0 changes nothing
    np.testing.assert_allclose(pull(found)[0], embeddings, atol=1e-5)  # the rotation back


# ---------------------------------------------------------------------- sums of rows by index

SIZE, COLUMNS = 7, 5


def rows_of(count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(count)
    table = random.standard_normal((SIZE, COLUMNS)).astype(np.float32)
    at = random.integers(0, SIZE + 2, count).astype(np.int32)  # two indices are behind the table
    rows = random.standard_normal((count, COLUMNS)).astype(np.float32)
    return jnp.asarray(table), jnp.asarray(at), jnp.asarray(rows)


@pytest.mark.parametrize("count", [1, 13])
@pytest.mark.parametrize("function", [add_rows, _sorted_sums])  # the second on accelerators
def test_rows_of_one_index_are_added(function, count: int) -> None:
    table, at, rows = rows_of(count)
    number, sums = jnp.arange(count), jax.jit(function)
    for which in (at, jnp.full(count, 3), number % SIZE, jnp.sort(number % 2)):
        expected = np.array(table, np.float64)
        for index, row in zip(np.asarray(which), np.asarray(rows, np.float64)):
            if index < SIZE:
                expected[index] += row
        found = sums(table, which.astype(jnp.int32), rows)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_look_up_has_the_gradient_of_indexing_and_a_gpu_adds_in_a_fixed_order() -> None:
    table, at, rows = rows_of(20)
    at = at % SIZE

    def gradient(table, at, rows):
        return jax.grad(lambda t: (take_rows(t, at) * rows).sum())(table)

    np.testing.assert_array_equal(take_rows(table, at), table[at])
    wanted = jax.grad(lambda t: (t[at] * rows).sum())(table)
    np.testing.assert_array_equal(gradient(table, at, rows), wanted)  # a CPU uses the scatter
    traced = jax.jit(gradient).trace(table, at, rows)
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).compiler_ir("hlo").as_hlo_text()
        for platform in ("cpu", "cuda")
    }
    assert " sort(" not in texts["cpu"]
    assert texts["cpu"].count(" scatter(") == texts["cuda"].count(" scatter(") == 1
    assert nondeterministic(texts["cuda"]) == []
    assert nondeterministic(texts["cpu"])


# ---------------------------------------------------------------------- packed rows

ENCODER = tiny_encoder()
PARAMS = tower(ENCODER, 0)
ROWS, WIDTH = 13, 27
LENGTHS = np.array([0, 27, 3, 8, 9, 0, 16, 17, 1, 27, 2, 24, 7], np.int32)
# Ordinary tokens stand in the padding too: it must not be looked at.
TOKENS = np.random.default_rng(0).integers(FIRST_WORD, VOCAB, (ROWS, WIDTH)).astype(np.int32)
BLOCKS = Blocks((32, 64), (8, 16, 30), (4.0, 12.0, 22.0))
embed = jax.jit(reference.embed, static_argnums=0)
embedded = jax.jit(embed_rows, static_argnums=(0, 1))


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
    repeated, nines = TOKENS.copy(), np.full(ROWS, 9, np.int32)
    repeated[5:9] = TOKENS[1]
    _, count = embedded(ENCODER, BLOCKS, PARAMS, TokenRows(repeated, nines))
    assert float(count[0]) == 9 * (ROWS - 4)  # equal rows are computed once
    assert embedded._cache_size() <= programs + 1


def test_rows_of_equal_hash_are_told_apart_by_their_tokens() -> None:
    # MULTIPLIER more at the first place weigh as much as one more at the second.
    clash = np.array([[5 + MULTIPLIER, 5, 7], [5, 6, 7], [5 + MULTIPLIER, 5, 7]], np.int32)
    lengths = jnp.full(3, 3, jnp.int32)
    assert len(set(row_digests(jnp.asarray(clash), lengths).tolist())) == 1
    found = jax.jit(first_of_its_kind)(jnp.asarray(clash), lengths)
    assert found.tolist() == [0, 1, 0]

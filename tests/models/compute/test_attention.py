"""Attention over right-padded rows against JAX's own."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.attention import Window, padded_attention
from qrag_jax.models.compute.packing import choose_blocks
from qrag_jax.models.compute.precision import LIBRARY, PRODUCTS, Precision, precision
from qrag_jax.runtime.platform import Platform

BATCH, LENGTH, HEADS, WIDTH = 4, 9, 3, 8
# What is compared with: a GPU would round its factors to TF32.
exactly = partial(jax.default_matmul_precision, "highest")
LENGTHS = np.array([9, 1, 4, 8], np.int32)


def inputs(dtype=np.float32) -> list[jax.Array]:
    """Query, key, value and a cotangent."""
    rng = np.random.default_rng(0)
    arrays = 2 * rng.standard_normal((4, BATCH, LENGTH, HEADS, WIDTH))
    return [jnp.asarray(array, dtype) for array in arrays]


@exactly()
def library(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=LENGTHS)


def ours(query, key, value):
    return padded_attention(query, key, value, LENGTHS)


def test_values_and_gradients_equal_the_librarys() -> None:
    *qkv, cotangent = inputs()

    def with_gradients(function):
        result, pull = jax.vjp(function, *qkv)
        return result, *pull(cotangent)

    found, expected = jax.jit(lambda: (with_gradients(ours), with_gradients(library)))()
    for one, reference in zip(found, expected, strict=True):
        assert one.shape == (BATCH, LENGTH, HEADS, WIDTH)
        np.testing.assert_allclose(one, reference, atol=1e-5)


def test_equals_softmax_over_the_keys_of_the_row() -> None:
    query, key, value, _ = (np.asarray(x, np.float64) for x in inputs())
    found = np.asarray(ours(*inputs()[:3]))
    for b, length in enumerate(LENGTHS):
        for h in range(HEADS):
            scores = query[b, :, h] @ key[b, :length, h].T / np.sqrt(WIDTH)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            np.testing.assert_allclose(found[b, :, h], weights @ value[b, :length, h], atol=1e-5)


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_causal_and_grouped_heads_equal_the_librarys(heads: int) -> None:
    rng = np.random.default_rng(1)
    draw = lambda count: jnp.asarray(rng.standard_normal((BATCH, LENGTH, count, WIDTH)), np.float32)  # noqa: E731
    query, key, value = draw(heads), draw(2), draw(2)
    inside = (np.arange(LENGTH) < LENGTHS[:, None])[..., None, None]
    cotangent = jnp.where(inside, draw(heads), 0)

    def with_gradients(function):
        result, pull = jax.vjp(function, query, key, value)
        return jnp.where(inside, result, 0), *pull(cotangent)

    @exactly()
    def causal_library(query, key, value):
        return jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=LENGTHS, is_causal=True
        )

    found = with_gradients(lambda *qkv: padded_attention(*qkv, LENGTHS, causal=True))
    for one, expected in zip(found, with_gradients(causal_library), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


def test_grouped_heads_without_a_causal_mask() -> None:
    query, key, value, _ = inputs()
    key, value = key[:, :, :1], value[:, :, :1]
    repeated = library(query, *(jnp.repeat(x, HEADS, axis=2) for x in (key, value)))
    np.testing.assert_allclose(ours(query, key, value), repeated, atol=1e-5)


def test_keys_and_values_in_the_padding_get_no_gradient() -> None:
    *qkv, cotangent = inputs()
    _, d_key, d_value = jax.vjp(ours, *qkv)[1](cotangent)
    padding = np.arange(LENGTH) >= LENGTHS[:, None]
    np.testing.assert_array_equal(np.asarray(d_key)[padding], 0)
    np.testing.assert_array_equal(np.asarray(d_value)[padding], 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keeps_the_dtype(dtype) -> None:
    *qkv, cotangent = inputs(dtype)
    result, pull = jax.vjp(ours, *qkv)
    assert result.dtype == dtype
    assert all(gradient.dtype == dtype for gradient in pull(cotangent))


def test_bfloat16_is_close_to_float32() -> None:
    *qkv, cotangent = inputs(jnp.bfloat16)
    result, pull = jax.vjp(ours, *qkv)
    exact, exact_pull = jax.vjp(library, *(x.astype(jnp.float32) for x in qkv))
    np.testing.assert_allclose(result.astype(jnp.float32), exact, atol=0.06)
    for found, expected in zip(pull(cotangent), exact_pull(cotangent.astype(jnp.float32))):
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.03 * scale)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX checks and lowers for cuDNN where there is none."""
    lowering = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(lowering, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(lowering, "check_compute_capability", lambda capability: True)


def lowered_for_gpu(length: int, width: int, **options) -> str:
    """The gradient of attention as it is lowered for an NVIDIA GPU; raises what its checks say."""
    heads = jax.ShapeDtypeStruct((4, length, 4, width), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)

    def total(query, key, value, lengths):
        half = precision("bfloat16", Platform("gpu", (9, 0)))
        found = padded_attention(query, key, value, lengths, precision=half, **options)
        return found.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(heads, heads, heads, lengths)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_the_default_config_take_the_fused_kernel_of_gpus(cudnn, width, causal) -> None:
    """Its longest state has 287 tokens: cuDNN refuses a gradient of rows of an odd length."""
    rows = np.bincount([287, 180, 90], minlength=288)
    for length in choose_blocks(rows, 8192, 2, 2, multiples=(64, 8)).lengths:
        program = lowered_for_gpu(length, width, causal=causal)
        assert "__cudnn$fmhaSoftmaxBackward" in program
    direct = jax.ShapeDtypeStruct((4, 287, 4, width), jnp.bfloat16)

    def total(query):
        attention = jax.nn.dot_product_attention
        return attention(query, query, query, implementation="cudnn").astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="Unsupported sequence length Q 287"):
        jax.jit(jax.grad(total)).trace(direct)


@pytest.mark.parametrize("asked", [True, False])
def test_each_gradient_says_itself_that_it_is_deterministic(cudnn, monkeypatch, asked) -> None:
    """XLA would write it into the first of equal calls alone, and find no kernel for the others."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_deterministic_ops={str(asked).lower()}")
    calls = [line for line in lowered_for_gpu(288, 64).splitlines() if "__cudnn$fmha" in line]
    gradients = [line for line in calls if "__cudnn$fmhaSoftmaxBackward" in line]
    assert len(calls) == 2
    assert len(gradients) == 1
    assert ("force_deterministic" in gradients[0]) == asked
    assert sum("force_deterministic" in line for line in calls) == asked


@pytest.mark.parametrize(("length", "width"), [(287, 64), (288, 36), (288, 256)])
def test_what_the_fused_kernel_does_not_take_is_left_to_xla(cudnn, length, width) -> None:
    with jax.numpy_dtype_promotion("standard"):  # which JAX's own attention needs
        assert "cudnn" not in lowered_for_gpu(length, width)


# ---------------------------------------------------------------------- windows and learned biases


def seen_by_hand(reach: int) -> np.ndarray:
    position = np.arange(LENGTH)
    return np.abs(position[:, None] - position[None]) <= reach


def with_gradients(function, *arguments):
    """The result within rows, and the gradients of the arguments."""
    cotangent = inputs()[3]
    inside = jnp.asarray((np.arange(LENGTH) < LENGTHS[:, None])[..., None, None])
    result, pull = jax.vjp(function, *arguments)
    return jnp.where(inside, result, 0), *pull(jnp.where(inside, cotangent, 0))


@pytest.mark.parametrize("attention", [PRODUCTS, LIBRARY])
@pytest.mark.parametrize("reach", [0, 2, LENGTH])
@pytest.mark.parametrize("biased", [False, True])
def test_a_window_and_a_bias(attention: str, reach: int, biased: bool) -> None:
    bias = np.random.default_rng(3).normal(size=(HEADS, LENGTH, LENGTH)).astype(np.float32)
    given = (*inputs()[:3], bias) if biased else inputs()[:3]
    how = Precision(attention=attention)

    def found(applies):
        def attend(query, key, value, bias=None):
            window = Window(reach, applies)
            options = {"precision": how, "window": window, "bias": bias}
            return padded_attention(query, key, value, LENGTHS, **options)

        return with_gradients(attend, *given)

    def expected(mask):
        @exactly()
        def attend(query, key, value, bias=None):
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / WIDTH**0.5
            scores = scores if bias is None else scores + bias[None]
            keys = jnp.asarray(mask & (np.arange(LENGTH) < LENGTHS[:, None])[:, None])[:, None]
            weights = jax.nn.softmax(jnp.where(keys, scores, -1e9))
            return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

        return with_gradients(attend, *given)

    with jax.numpy_dtype_promotion("standard"):  # which JAX's own attention needs
        for applies, mask in ((True, seen_by_hand(reach)), (False, seen_by_hand(LENGTH))):
            results = jax.jit(found)(applies), expected(mask)
            for one, reference in zip(*results, strict=True):
                np.testing.assert_allclose(one, reference, atol=2e-5)


def test_local_layers_leave_the_fused_kernel_to_global_ones(cudnn) -> None:
    """A kernel of cuDNN takes no window on both sides: the layer's kind decides on the device."""

    def program(length: int) -> str:
        return lowered_for_gpu(length, 64, window=Window(64, jnp.asarray(True)))

    with jax.numpy_dtype_promotion("standard"):
        long, short = program(128), program(64)
    assert "__cudnn$fmhaSoftmaxBackward" in long
    assert "stablehlo.case" in long
    assert "__cudnn$fmhaSoftmaxBackward" in short  # every key is near
    assert "stablehlo.case" not in short


def test_causal_attention_takes_no_window() -> None:
    window = Window(2, jnp.asarray(True))
    with pytest.raises(ValueError, match="causal attention takes neither a window nor a bias"):
        padded_attention(*inputs()[:3], LENGTHS, causal=True, window=window)

"""Attention over right-padded rows by its definition and in the kernels of GPUs; its precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.compute.attention import Window, padded_attention
from qrag_jax.models.compute.packing import choose_blocks
from qrag_jax.models.compute.precision import LIBRARY, PRODUCTS, Precision, precision
from qrag_jax.runtime.platform import Platform

BATCH, LENGTH, HEADS, WIDTH = 4, 9, 4, 8
LENGTHS = np.array([9, 1, 4, 8], np.int32)
INSIDE = np.arange(LENGTH) < LENGTHS[:, None]
FULL, HALF = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def inputs(groups: int = HEADS, dtype: Any = np.float32) -> list[jax.Array]:
    """Query, key, value, of which a cotangent within rows, and a learned bias."""
    rng = np.random.default_rng(0)
    heads = (HEADS, groups, groups, HEADS)
    arrays = [2 * rng.standard_normal((BATCH, LENGTH, number, WIDTH)) for number in heads]
    arrays[3] = np.where(INSIDE[..., None, None], arrays[3], 0)
    bias = rng.normal(size=(HEADS, LENGTH, LENGTH))
    return [jnp.asarray(array, dtype) for array in (*arrays, bias)]


def definition(
    seen: np.ndarray, query: Any, key: Any, value: Any, bias: Any | None = None
) -> jax.Array:
    """A softmax over the keys of the row that a query sees; heads share the keys of a group."""
    key, value = (jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (key, value))
    highest = jax.lax.Precision.HIGHEST  # a GPU would round the factors to TF32
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision=highest) / np.float32(WIDTH**0.5)
    scores = scores if bias is None else scores + bias[None]
    keys = jnp.asarray(seen & INSIDE[:, None])[:, None]
    weights = jax.nn.softmax(jnp.where(keys, scores, np.float32(-1e9)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision=highest)


def with_gradients(function: Callable[..., jax.Array], *given: jax.Array) -> list[np.ndarray]:
    """The result within rows, and the gradients."""
    cotangent = inputs()[3]

    @jax.jit
    def compute(*given: jax.Array) -> Any:
        result, pull = jax.vjp(function, *given)
        inside = jnp.where(INSIDE[..., None, None], result, 0)
        return inside, *pull(cotangent.astype(result.dtype))

    return [np.asarray(each) for each in compute(*given)]


def check(found: list[np.ndarray], expected: list[np.ndarray], within: float = 2e-5) -> None:
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, reference, atol=within)


POSITION = np.arange(LENGTH)
EVERY = np.ones((LENGTH, LENGTH), bool)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_softmax_over_the_keys_of_the_row(groups: int, causal: bool) -> None:
    given = inputs(groups)[:3]
    found = with_gradients(lambda *qkv: padded_attention(*qkv, LENGTHS, causal=causal), *given)
    seen = POSITION[:, None] >= POSITION if causal else EVERY
    check(found, with_gradients(partial(definition, seen), *given))
    for gradient in found[2:]:  # of keys and values in the padding
        np.testing.assert_array_equal(gradient[~INSIDE], 0)


@pytest.mark.parametrize(
    ("attention", "reach", "biased"),
    [(PRODUCTS, 0, False), (PRODUCTS, 2, True), (LIBRARY, 2, True), (LIBRARY, LENGTH, False)],
)
def test_a_window_and_a_bias(attention: str, reach: int, biased: bool) -> None:
    query, key, value, _, bias = inputs()
    given = (query, key, value, bias) if biased else (query, key, value)
    how = Precision(attention=attention)
    near = np.abs(POSITION[:, None] - POSITION) <= reach
    with jax.numpy_dtype_promotion("standard"):  # which JAX's own attention needs
        for applies, seen in ((True, near), (False, EVERY)):

            def attend(query: Any, key: Any, value: Any, bias: Any = None) -> jax.Array:
                window = Window(reach, jnp.asarray(applies))  # noqa: B023
                options = {"precision": how, "window": window, "bias": bias}
                return padded_attention(query, key, value, LENGTHS, **options)

            check(with_gradients(attend, *given), with_gradients(partial(definition, seen), *given))


# ---------------------------------------------------------------------- precision


@pytest.mark.parametrize("activations", [HALF, FULL])
def test_bfloat16_is_close_to_float32(activations: Any) -> None:
    """Of whole half precision, and of its products alone, as on CPU."""
    given = inputs(dtype=activations)[:3]
    how = Precision(activations, HALF)
    found = with_gradients(lambda *qkv: padded_attention(*qkv, LENGTHS, precision=how), *given)
    expected = with_gradients(partial(definition, EVERY), *(x.astype(FULL) for x in given))
    for one, reference in zip(found, expected, strict=True):
        assert one.dtype == activations
        difference = np.abs(one.astype(np.float32) - reference).max()
        assert 0 < difference < 0.03 * np.abs(reference).max()


def test_names_of_precisions() -> None:
    cpu, tpu = Platform("cpu"), Platform("tpu")
    hopper, volta = Platform("gpu", (9, 0)), Platform("gpu", (7, 0))
    for name, platform, activations, expected in (
        ("float32", cpu, "auto", (FULL, FULL, "products")),
        ("bfloat16", cpu, "auto", (FULL, HALF, "products")),
        ("bfloat16", cpu, "bfloat16", (HALF, HALF, "products")),  # as GPUs do
        ("auto", hopper, "auto", (HALF, HALF, "fused")),
        ("bfloat16", hopper, "bfloat16", (HALF, HALF, "fused")),
        ("float32", hopper, "auto", (FULL, FULL, "library")),
        ("auto", hopper, "float32", (FULL, HALF, "library")),
        ("auto", volta, "auto", (FULL, FULL, "library")),
        ("auto", tpu, "auto", (HALF, HALF, "library")),
    ):
        assert precision(name, platform, activations) == Precision(*expected)
    for name, platform, activations, named in (
        ("float32", hopper, "bfloat16", "activations"),
        ("auto", cpu, "half", "activations"),
        ("bfloat16", volta, "auto", "dtype"),
        ("half", cpu, "auto", "dtype"),
    ):
        with pytest.raises(InputError, match=rf"config\.encoder\.{named}"):
            precision(name, platform, activations)


# ---------------------------------------------------------------------- the kernels of GPUs


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX checks and lowers for cuDNN where there is none."""
    lowering = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(lowering, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(lowering, "check_compute_capability", lambda capability: True)


def lowered_for_gpu(length: int, width: int, **options: Any) -> str:
    """The gradient of attention as it is lowered for an NVIDIA GPU; raises what its checks say."""
    heads = jax.ShapeDtypeStruct((4, length, 4, width), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)

    def total(query, key, value, lengths):
        half = precision("bfloat16", Platform("gpu", (9, 0)))
        found = padded_attention(query, key, value, lengths, precision=half, **options)
        return found.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(heads, heads, heads, lengths)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("width", "causal"), [(32, False), (64, False), (128, True)])
def test_rows_of_the_default_config_take_the_fused_kernel_of_gpus(cudnn, width, causal) -> None:
    """Its longest state has 287 tokens: cuDNN refuses a gradient of rows of an odd length."""
    rows = np.bincount([287, 180, 90], minlength=288)
    for length in choose_blocks(rows, 8192, 2, 2, multiples=(64, 8)).lengths:
        assert "__cudnn$fmhaSoftmaxBackward" in lowered_for_gpu(length, width, causal=causal)


@pytest.mark.parametrize("asked", [True, False])
def test_each_gradient_says_itself_that_it_is_deterministic(cudnn, monkeypatch, asked) -> None:
    """XLA would write it into the first of equal calls alone, and find no kernel for the others."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_deterministic_ops={str(asked).lower()}")
    calls = [line for line in lowered_for_gpu(288, 64).splitlines() if "__cudnn$fmha" in line]
    gradients = [line for line in calls if "__cudnn$fmhaSoftmaxBackward" in line]
    assert (len(calls), len(gradients)) == (2, 1)
    assert ("force_deterministic" in gradients[0]) == asked
    assert sum("force_deterministic" in line for line in calls) == asked

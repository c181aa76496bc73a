"""Linear maps, rotations by position and sums of rows, against their definitions."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.linear import Linear, linear
from qrag_jax.models.compute.rope import rotate
from qrag_jax.models.compute.row_sums import _sorted_sums, add_rows, take_rows
from tests.reference import rotated
from tests.support.hlo import nondeterministic

# ---------------------------------------------------------------------- the linear map


def draws() -> tuple[jax.Array, ...]:
    """x, kernel, bias and a cotangent."""
    rng = np.random.default_rng(0)
    shapes = ((2, 5, 6), (6, 4), (4,), (2, 5, 4))
    return tuple(jnp.asarray(rng.standard_normal(shape), np.float32) for shape in shapes)


@pytest.mark.parametrize("biased", [True, False])
def test_value_and_gradients_equal_autodiffs(biased: bool) -> None:
    *inputs, cotangent = draws()
    inputs = inputs if biased else inputs[:2]

    def plain(x, kernel, bias=None):
        found = jnp.einsum("abi,io->abo", x, kernel)
        return found if bias is None else found + bias[None, None]

    found, pull = jax.vjp(partial(linear, jnp.float32), *inputs)
    expected, plain_pull = jax.vjp(plain, *inputs)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for one, other in zip(pull(cotangent), plain_pull(cotangent), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    own, dense = Linear(4, use_bias=biased), nn.Dense(4, use_bias=biased)
    params = dense.init(jax.random.key(0), inputs[0])
    assert jax.tree.structure(params) == jax.tree.structure(own.init(jax.random.key(0), inputs[0]))
    np.testing.assert_allclose(
        own.apply(params, inputs[0]), dense.apply(params, inputs[0]), atol=1e-6
    )


def test_half_precision_inputs_give_float32_gradients_of_float32_parameters() -> None:
    x, kernel, bias, cotangent = draws()
    half, gradient = x.astype(jnp.bfloat16), cotangent.astype(jnp.bfloat16)
    result, pull = jax.vjp(partial(linear, jnp.bfloat16), half, kernel, bias)
    d_x, d_kernel, d_bias = pull(gradient)
    assert result.dtype == d_x.dtype == jnp.bfloat16
    assert d_kernel.dtype == d_bias.dtype == jnp.float32
    # Summed in float32: exact for the rounded inputs.
    exact = np.einsum("abi,abo->io", np.asarray(half, np.float64), np.asarray(gradient, np.float64))
    np.testing.assert_allclose(d_kernel, exact, atol=1e-5)


# ---------------------------------------------------------------------- rotations


@pytest.mark.parametrize("positions", [[0, 1, 18, 139], [0, 1023, 1024, 399_999]])
def test_halves_are_rotated_by_the_definition(positions) -> None:
    embeddings = np.random.default_rng(0).normal(size=(4, 24)).astype(np.float32)
    found, pull = jax.vjp(
        lambda e: rotate(e, jnp.asarray(positions), max(positions)), jnp.asarray(embeddings)
    )
    expected = [rotated(e, p) for e, p in zip(embeddings, positions, strict=True)]
    np.testing.assert_allclose(found, expected, atol=3e-6)
    np.testing.assert_array_equal(found[0], embeddings[0])  # position 0 changes nothing
    # The gradient is the rotation back.
    np.testing.assert_allclose(pull(found)[0], embeddings, atol=1e-5)


# ---------------------------------------------------------------------- sums of rows by index

SIZE, WIDTH = 7, 5


def rows_of(count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(count)
    table = random.standard_normal((SIZE, WIDTH)).astype(np.float32)
    at = random.integers(0, SIZE + 2, count).astype(np.int32)  # two indices are behind the table
    rows = random.standard_normal((count, WIDTH)).astype(np.float32)
    return jnp.asarray(table), jnp.asarray(at), jnp.asarray(rows)


def expected_sums(table, at, rows) -> np.ndarray:
    found = np.array(table, np.float64)
    for index, row in zip(np.asarray(at), np.asarray(rows, np.float64)):
        if index < SIZE:
            found[index] += row
    return found


@pytest.mark.parametrize("count", [1, 2, 13, 64])
@pytest.mark.parametrize("function", [add_rows, _sorted_sums])  # the second on accelerators
def test_rows_of_one_index_are_added(function, count: int) -> None:
    table, at, rows = rows_of(count)
    number, sums = jnp.arange(count), jax.jit(function)
    for which in (at, jnp.full(count, 3), number % SIZE, jnp.sort(number % 2)):
        which = which.astype(jnp.int32)
        found = sums(table, which, rows)
        np.testing.assert_allclose(found, expected_sums(table, which, rows), rtol=1e-5, atol=1e-5)


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

"""The linear map and its own gradient against `nn.Dense` and autodiff."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.models.compute.linear import Form, Linear, linear, linear_without_bias


def draws(dtype=np.float32) -> tuple[jax.Array, ...]:
    """x, kernel, bias and a cotangent."""
    rng = np.random.default_rng(0)
    shapes = ((2, 5, 6), (6, 4), (4,), (2, 5, 4))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def test_value_and_gradients_equal_autodiffs() -> None:
    *inputs, cotangent = draws()

    def plain(x, kernel, bias):
        return jnp.einsum("abi,io->abo", x, kernel) + bias[None, None]

    found, pull = jax.vjp(partial(linear, Form(jnp.float32)), *inputs)
    expected, plain_pull = jax.vjp(plain, *inputs)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for one, other in zip(pull(cotangent), plain_pull(cotangent), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_parameters_of_the_module_are_those_of_dense() -> None:
    x = draws()[0]
    params = nn.Dense(4).init(jax.random.key(0), x)
    assert jax.tree.structure(params) == jax.tree.structure(Linear(4).init(jax.random.key(0), x))
    np.testing.assert_allclose(Linear(4).apply(params, x), nn.Dense(4).apply(params, x), atol=1e-6)


def test_half_precision_inputs_give_float32_gradients_of_float32_parameters() -> None:
    x, kernel, bias, cotangent = draws()
    half, gradient = x.astype(jnp.bfloat16), cotangent.astype(jnp.bfloat16)
    result, pull = jax.vjp(
        partial(linear, Form(jnp.bfloat16)), half, kernel.astype(jnp.float32), bias
    )
    d_x, d_kernel, d_bias = pull(gradient)
    assert result.dtype == d_x.dtype == jnp.bfloat16
    assert d_kernel.dtype == d_bias.dtype == jnp.float32
    # Summed in float32: exact for the rounded inputs.
    exact = np.einsum("abi,abo->io", np.asarray(half, np.float64), np.asarray(gradient, np.float64))
    np.testing.assert_allclose(d_kernel, exact, atol=1e-5)


def test_without_bias() -> None:
    x, kernel, _, cotangent = draws()
    found, pull = jax.vjp(partial(linear_without_bias, Form(jnp.float32)), x, kernel)
    expected, plain_pull = jax.vjp(
        lambda x, kernel: jnp.einsum("abi,io->abo", x, kernel), x, kernel
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for one, other in zip(pull(cotangent), plain_pull(cotangent), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    params = Linear(4, use_bias=False).init(jax.random.key(0), x)
    assert set(params["params"]) == {"kernel"}

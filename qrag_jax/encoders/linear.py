"""The linear map of every encoder, with a gradient in the form the hardware runs fastest."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


@jax.custom_vjp
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """x·W + b over the last axis: x `[..., I]`, kernel `[I, O]`, bias `[O]` → `[..., O]`.

    Computed in x's dtype; the gradients of kernel and bias are summed in float32. They are
    products of x and the cotangent as they lie in memory: autodiff asks for their transposes, and
    on CPU those copies cost a tenth of a training step.
    """
    rows = x.reshape(-1, x.shape[-1])
    product = rows @ kernel.astype(x.dtype) + bias.astype(x.dtype)
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


def _forward(x, kernel, bias):
    return linear(x, kernel, bias), (x, kernel, bias)


def _backward(saved, gradient):
    x, kernel, bias = saved
    rows = x.reshape(-1, x.shape[-1])
    gradient = gradient.reshape(-1, gradient.shape[-1])
    d_x = (gradient @ kernel.astype(x.dtype).T).reshape(x.shape)
    over_rows = (((0,), (0,)), ((), ()))
    d_kernel = jax.lax.dot_general(
        rows, gradient, over_rows, preferred_element_type=jnp.float32
    ).astype(kernel.dtype)
    d_bias = gradient.astype(jnp.float32).sum(axis=0).astype(bias.dtype)
    return d_x, d_kernel, d_bias


linear.defvjp(_forward, _backward)


class Linear(nn.Module):
    """`linear` as a Flax module with the parameters of `nn.Dense`."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., I]` → `[..., features]` in x's dtype."""
        kernel = self.param(
            "kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features), jnp.float32
        )
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
        return linear(x, kernel, bias)

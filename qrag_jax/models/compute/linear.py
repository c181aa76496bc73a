"""The linear map of every encoder, with a gradient in the form the hardware runs fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from qrag_jax.models.compute.dropout import TokenDropout, drop
from qrag_jax.models.compute.precision import exact

# Leaves next to the kernel of a linear map that has a low-rank adapter (`lora`).
LORA_A, LORA_B = ADAPTER = ("lora_a", "lora_b")
LORA_KEY = "lora_key"  # a further leaf if dropout acts on the adapter's inputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(
    products: jnp.dtype, x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """x·W + b over the last axis: x `[..., I]`, kernel `[I, O]`, bias `[O]` → `[..., O]`.

    Factors are rounded to the dtype `products`, sums inside products are float32, the result has
    x's dtype. The gradients of kernel and bias have the dtypes of kernel and bias. They are
    computed from x and the cotangent as these lie in memory. Autodiff would transpose both first,
    and on CPU those copies cost a tenth of a training step.
    """
    rows = x.reshape(-1, x.shape[-1])
    product = _product(products, rows, kernel, ((1,), (0,)), x.dtype)
    product = product.reshape(*x.shape[:-1], kernel.shape[-1])
    return product if bias is None else product + bias.astype(x.dtype)[(None,) * (x.ndim - 1)]


def _product(products, one, other, contracted, result):
    return jax.lax.dot_general(
        one.astype(products),
        other.astype(products),
        (contracted, ((), ())),
        precision=exact(products),
        preferred_element_type=result,
    )


def _forward(products, x, kernel, bias=None):
    return linear(products, x, kernel, bias), (x, kernel, bias)


def _backward(products, saved, gradient):
    x, kernel, bias = saved
    rows, product = x.reshape(-1, x.shape[-1]), partial(_product, products)
    gradient = gradient.reshape(-1, gradient.shape[-1])
    d_x = product(gradient, kernel, ((1,), (1,)), x.dtype).reshape(x.shape)
    d_kernel = product(rows, gradient, ((0,), (0,)), jnp.float32).astype(kernel.dtype)
    d_bias = None
    if bias is not None:
        d_bias = gradient.astype(jnp.float32).sum(axis=0).astype(bias.dtype)
    return d_x, d_kernel, d_bias


linear.defvjp(_forward, _backward)


class Linear(nn.Module):
    """`linear` as a Flax module with the parameters of `nn.Dense`.

    If the parameters also have `lora_a` `[I, r]` and `lora_b` `[r, O]`, it adds (x·A)·B. If they
    have `lora_key` `[k, 2]` as well, A consists of k matrices side by side, and x passes through a
    separate mask for each of them (`dropout.drop`). x·W uses x without a mask.
    """

    features: int  # O
    products: jnp.dtype = jnp.float32
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, dropout: TokenDropout | None = None) -> jax.Array:
        """`[..., I]` → `[..., features]` in x's dtype."""
        shape = x.shape[-1], self.features
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), shape[1:], jnp.float32)
        result = linear(self.products, x, kernel, bias)
        if self.has_variable("params", LORA_A):
            result = result + self._low_rank(x, dropout)
        return result

    def _low_rank(self, x: jax.Array, dropout: TokenDropout | None) -> jax.Array:
        """(x·A)·B."""
        of_map = partial(linear, self.products)
        a: jax.Array = self.get_variable("params", LORA_A)
        b: jax.Array = self.get_variable("params", LORA_B)
        if not self.has_variable("params", LORA_KEY):
            return of_map(of_map(x, a), b)
        keys: jax.Array = self.get_variable("params", LORA_KEY)
        if dropout is None:
            raise ValueError("dropout needs rows with digests: encode them by `ragged`")
        parts = zip(keys, jnp.split(a, len(keys), axis=1), strict=True)
        dropped = [of_map(drop(x, key, dropout.digests, dropout.rate), part) for key, part in parts]
        return of_map(jnp.concatenate(dropped, axis=1), b)


def side_by_side(parts: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """Joins several linear maps of the same x into the parameters of one `Linear`.

    The arrays may have further axes in front, such as that of stacked layers. Kernels and biases
    are concatenated. Some parts may have no adapter. The adapters become one adapter whose rank is
    the sum of their ranks: the matrices A stand side by side, the matrices B form a block diagonal.
    The dropout keys of all adapters are kept, so each adapter has the same mask as when the maps
    are computed one by one.
    """
    own = (*ADAPTER, LORA_KEY)
    plain = [{n: leaf for n, leaf in part.items() if n not in own} for part in parts]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *plain)
    before, width = 0, joined["kernel"].shape[-1]
    a, b, keys = [], [], []
    for part in parts:
        after = before + part["kernel"].shape[-1]
        if LORA_A in part:
            a.append(part[LORA_A])
            widths = [(0, 0)] * (part[LORA_B].ndim - 1) + [(before, width - after)]
            b.append(jnp.pad(part[LORA_B], widths))
            keys += [part[LORA_KEY]] if LORA_KEY in part else []
        before = after
    if a:
        joined |= {LORA_A: jnp.concatenate(a, axis=-1), LORA_B: jnp.concatenate(b, axis=-2)}
    return joined | ({LORA_KEY: jnp.concatenate(keys, axis=-2)} if keys else {})

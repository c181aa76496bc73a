"""The linear map of every encoder, with a gradient in the form the hardware runs fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from qrag_jax.models.compute.dropout import TokenDropout, drop
from qrag_jax.models.compute.group import (
    TENSOR,
    Group,
    first_of_part,
    on_one,
    sum_to_part,
    summed,
    used_by_all,
    whole,
)
from qrag_jax.models.compute.precision import exact

# Leaves beside the kernel of a linear map that has a low-rank adapter (`lora`).
LORA_A, LORA_B = ADAPTER = ("lora_a", "lora_b")
HELD = "held_kernel"  # the whole kernel beside a part of it, gathered ahead (`prefetch`)
LORA_KEY = "lora_key"  # a further leaf if dropout acts on the adapter's inputs


class Form(NamedTuple):
    """How a product is computed.

    Attributes:
        products: the dtype that its factors are rounded to.
        axis: of the kernel, along which a device holds a part of it; None: the kernel is whole.
        group: the devices that hold the parts.
    """

    products: jnp.dtype
    axis: int | None = None
    group: Group = Group()

    def kernel(self, part: jax.Array) -> jax.Array:
        """The whole kernel, in the dtype of the products: parts are gathered as they multiply."""
        part = part.astype(self.products)
        return part if self.axis is None else whole(self.group, self.axis, part)

    def gradient(self, of_kernel: jax.Array, part: jax.Array) -> jax.Array:
        """The gradient of a device's part of the kernel."""
        if self.axis is not None:
            of_kernel = sum_to_part(self.group, self.axis, of_kernel)
        return of_kernel.astype(part.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(
    form: Form,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    held: jax.Array | None = None,
) -> jax.Array:
    """x·W + b over the last axis: x `[..., I]`, kernel `[I, O]`, bias `[O]` → `[..., O]`.

    Sums inside products are float32, the result has x's dtype. The gradients of kernel and bias
    have the dtypes of kernel and bias. They are computed from x and the cotangent as these lie in
    memory. Autodiff would transpose both first, and on CPU those copies cost a tenth of a training
    step. A kernel in parts is gathered again for the gradient: only its part is kept. `held` is the
    whole kernel if it is gathered already, in the dtype of the products; no gradient reaches it.
    """
    rows, kernel = x.reshape(-1, x.shape[-1]), form.kernel(kernel) if held is None else held
    product = _product(form.products, rows, kernel, ((1,), (0,)), x.dtype)
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


def _forward(form, x, kernel, bias=None, held=None):
    return linear(form, x, kernel, bias, held), (x, kernel, bias, held)


def _backward(form, saved, gradient):
    x, kernel, bias, held = saved
    whole_kernel = form.kernel(kernel) if held is None else held
    rows, product = x.reshape(-1, x.shape[-1]), partial(_product, form.products)
    gradient = gradient.reshape(-1, gradient.shape[-1])
    d_x = product(gradient, whole_kernel, ((1,), (1,)), x.dtype).reshape(x.shape)
    d_kernel = form.gradient(product(rows, gradient, ((0,), (0,)), jnp.float32), kernel)
    d_bias = None
    if bias is not None:
        d_bias = gradient.astype(jnp.float32).sum(axis=0).astype(bias.dtype)
    return d_x, d_kernel, d_bias, None


linear.defvjp(_forward, _backward)


class Linear(nn.Module):
    """`linear` as a Flax module with the parameters of `nn.Dense`.

    If the parameters also have `lora_a` `[I, r]` and `lora_b` `[r, O]`, it adds (x·A)·B. If they
    have `lora_key` `[k, 2]` as well, A consists of k matrices side by side, and x passes through a
    separate mask for each of them (`dropout.drop`). x·W uses x without a mask.

    Attributes:
        features: O, on this device.
        group: the devices that hold the kernel together.
        closes: along `tensor` each device has a part of the inputs, and the products are summed;
            else each has a part of the outputs.
    """

    features: int
    products: jnp.dtype = jnp.float32
    use_bias: bool = True
    group: Group = Group()
    closes: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, dropout: TokenDropout | None = None) -> jax.Array:
        """`[..., I]` → `[..., features]` in x's dtype.

        Raises:
            ValueError: the parameters have `lora_key`, but `dropout` is None; or the kernel has
                neither the sizes of x and `features` nor those of its part.
        """
        group, (kernel, bias) = self.group, self._own(x)
        held = self.get_variable("params", HELD) if self.has_variable("params", HELD) else None
        if group.tensor > 1 and not self.closes:
            x = used_by_all(TENSOR, x)
        if bias is not None and self.closes:
            bias = on_one(group, bias)
        result = linear(self._form(x, kernel), x, kernel, bias, held)
        if self.has_variable("params", LORA_A):
            result = result + self._low_rank(x, dropout)
        return summed(TENSOR, result) if group.tensor > 1 and self.closes else result

    def _own(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The kernel and the bias, made if there are none yet."""
        if self.has_variable("params", "kernel"):  # `param` would refuse a part
            kernel: jax.Array = self.get_variable("params", "kernel")
        else:
            shape = x.shape[-1], self.features
            kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        if not self.use_bias:
            return kernel, None
        zeros = nn.initializers.zeros_init()
        return kernel, self.param("bias", zeros, (self.features,), jnp.float32)

    def _form(self, x: jax.Array, kernel: jax.Array) -> Form:
        """How the kernel is multiplied; its shape tells along which axis it is in parts."""
        sizes, parts = (x.shape[-1], self.features), self.group.fsdp
        shapes = {None: sizes, 0: (sizes[0] / parts, sizes[1]), 1: (sizes[0], sizes[1] / parts)}
        for axis, shape in shapes.items():
            if kernel.shape == shape:
                return Form(self.products, axis, self.group)
        raise ValueError(f"a kernel of {kernel.shape} is not one of {sizes} in {parts} parts")

    def _low_rank(self, x: jax.Array, dropout: TokenDropout | None) -> jax.Array:
        """(x·A)·B."""
        form = Form(self.products)
        a: jax.Array = self.get_variable("params", LORA_A)
        b: jax.Array = self.get_variable("params", LORA_B)
        if not self.has_variable("params", LORA_KEY):
            return linear(form, linear(form, x, a), b)
        keys: jax.Array = self.get_variable("params", LORA_KEY)
        if dropout is None:
            raise ValueError("dropout needs rows with digests: encode them by `ragged`")
        first = first_of_part(self.group, x.shape[-1]) if self.closes else 0
        parts = zip(keys, jnp.split(a, len(keys), axis=1), strict=True)
        dropped = [
            linear(form, drop(x, key, dropout.digests, dropout.rate, first), part)
            for key, part in parts
        ]
        return linear(form, jnp.concatenate(dropped, axis=1), b)


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

"""Linear maps, and low-rank adapters on them (LoRA; Hu et al., arXiv 2106.09685).

With an adapter a linear map becomes x·W + s·(x·A)·B with s = alpha / rank. W and all other
parameters of the base are frozen: one copy serves both towers, online and target. A tree of
adapters uses the paths of the stacked parameters: `layers/query/lora_a` `[n, in, r]` and
`layers/query/lora_b` `[n, r, out]`.

With dropout it is x·W + s·(d(x)·A)·B, where d is `dropout.drop` with a mask for each map that is
computed. Maps that are computed as one, such as query, key and value, share theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.models.compute.dropout import TokenDropout, drop, map_key
from qrag_jax.models.compute.precision import rounded_einsum

if TYPE_CHECKING:
    from qrag_jax.models.trunks.transformer import Params, Transformer

Leaves = dict[tuple[str, ...], jax.Array]  # by path
LORA_A, LORA_B = ADAPTER = ("lora_a", "lora_b")  # leaves next to the kernel of a map


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
    product = rounded_einsum(products, "ni,io->no", rows, kernel, x.dtype)
    product = product.reshape(*x.shape[:-1], kernel.shape[-1])
    return product if bias is None else product + bias.astype(x.dtype)[(None,) * (x.ndim - 1)]


def _forward(products, x, kernel, bias=None):
    return linear(products, x, kernel, bias), (x, kernel, bias)


def _backward(products, saved, gradient):
    x, kernel, bias = saved
    rows, product = x.reshape(-1, x.shape[-1]), partial(rounded_einsum, products)
    gradient = gradient.reshape(-1, gradient.shape[-1])
    d_x = product("no,io->ni", gradient, kernel, x.dtype).reshape(x.shape)
    d_kernel = product("ni,no->io", rows, gradient).astype(kernel.dtype)
    d_bias = None
    if bias is not None:
        d_bias = gradient.astype(jnp.float32).sum(axis=0).astype(bias.dtype)
    return d_x, d_kernel, d_bias


linear.defvjp(_forward, _backward)


class Linear(nn.Module):
    """`linear` as a Flax module with the parameters of `nn.Dense`.

    If the parameters also have `lora_a` `[I, r]` and `lora_b` `[r, O]`, it adds (x·A)·B.
    """

    features: int  # O
    products: jnp.dtype = jnp.float32
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, dropout: TokenDropout | None = None) -> jax.Array:
        """`[..., I]` → `[..., features]` in x's dtype; only what A multiplies is dropped."""
        shape, of_map = (x.shape[-1], self.features), partial(linear, self.products)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), shape[1:], jnp.float32)
        result = of_map(x, kernel, bias)
        if not self.has_variable("params", LORA_A):
            return result
        a: jax.Array = self.get_variable("params", LORA_A)
        b: jax.Array = self.get_variable("params", LORA_B)
        if dropout is not None and dropout.adapters:
            key = map_key(dropout.keys, str(self.name))
            x = drop(x, key, dropout.digests, dropout.adapters)
        return result + of_map(of_map(x, a), b)


def side_by_side(parts: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """Joins several linear maps of the same x into the parameters of one `Linear`.

    The arrays may have further axes in front, such as that of stacked layers. Kernels and biases
    are concatenated. Some parts may have no adapter. The adapters become one adapter whose rank is
    the sum of their ranks: the matrices A stand side by side, the matrices B form a block diagonal.
    """
    plain = [{n: leaf for n, leaf in part.items() if n not in ADAPTER} for part in parts]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *plain)
    before, width = 0, joined["kernel"].shape[-1]
    a, b = [], []
    for part in parts:
        after = before + part["kernel"].shape[-1]
        if LORA_A in part:
            a.append(part[LORA_A])
            widths = [(0, 0)] * (part[LORA_B].ndim - 1) + [(before, width - after)]
            b.append(jnp.pad(part[LORA_B], widths))
        before = after
    if not a:
        return joined
    return joined | {LORA_A: jnp.concatenate(a, axis=-1), LORA_B: jnp.concatenate(b, axis=-2)}


# ---------------------------------------------------------------------- adapters on a base


class Adapted(NamedTuple):
    """A frozen base and the adapters on it."""

    base: Params  # parameters of one tower, layers stacked
    adapters: Params  # of one tower, or of several towers stacked on axis 0


def merge(trainable: Params, frozen: Params | None) -> Params | Adapted:
    """A model's parameters: all that is trained, or adapters on their frozen base."""
    return trainable if frozen is None else Adapted(frozen, trainable)


def of_tower(params: Params | Adapted, number: int | jax.Array) -> Params | Adapted:
    """One of several towers stacked on axis 0; adapters keep their base."""
    if isinstance(params, Adapted):
        return params._replace(adapters=of_tower(params.adapters, number))
    return jax.tree.map(lambda leaf: leaf[number], params)


def attach(params: Params | Adapted, scale: float) -> Params:
    """One tower's parameters; adapters are put next to the kernels of their base.

    This is how `Linear` takes them; B is multiplied by `scale`.
    """
    if not isinstance(params, Adapted):
        return params
    adapters: Leaves = flatten_dict(params.adapters)
    leaves = flatten_dict(params.base) | {
        path: leaf * scale if path[-1] == LORA_B else leaf for path, leaf in adapters.items()
    }
    return unflatten_dict(leaves)


def trainable(
    trunk: Transformer, params: Params | Adapted, scale: float
) -> tuple[Leaves, Leaves, Callable[[Leaves], Params]]:
    """Leaves as the trunk takes them, trained and frozen, and how a gradient goes back.

    `params` are of one tower; all are trained, or adapters.
    """
    if not isinstance(params, Adapted):
        prepared = flatten_dict(trunk.prepare(params))
        return prepared, {}, lambda gradient: trunk.as_stored(unflatten_dict(gradient))

    def prepare(adapters: Params) -> tuple[Leaves, Leaves]:
        attached = attach(params._replace(adapters=adapters), scale)
        leaves = flatten_dict(trunk.prepare(attached, trunk.precision.products))
        trained = {path: leaf for path, leaf in leaves.items() if path[-1] in ADAPTER}
        return trained, {path: leaf for path, leaf in leaves.items() if path not in trained}

    trained, adapters_back, frozen = jax.vjp(prepare, params.adapters, has_aux=True)
    return trained, frozen, lambda gradient: adapters_back(gradient)[0]


def folded(params: Adapted, scale: float) -> Params:
    """One tower's parameters with the adapters' products added: W becomes W + s·A·B."""
    leaves, adapters = flatten_dict(params.base), flatten_dict(params.adapters)
    for path, b in adapters.items():
        if path[-1] == LORA_B:
            kernel = (*path[:-1], "kernel")
            leaves[kernel] = leaves[kernel] + scale * (adapters[*path[:-1], LORA_A] @ b)
    return unflatten_dict(leaves)

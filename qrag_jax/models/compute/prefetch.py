"""Passes through layers of which each device holds a part, and gathers one layer ahead.

While a layer is computed, the kernels of the next one are gathered; in the backward pass those of
the one before. So the devices of a group compute while they send. At most two layers are whole at
a time. For the gradient only the inputs of layers are kept, and all else is computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.models.compute.group import FSDP, Group
from qrag_jax.models.compute.linear import ADAPTER, HELD
from qrag_jax.models.compute.packing import Layout

Params = Any


class Passing(NamedTuple):
    """What passes through layers, apart from arrays; hashable.

    Attributes:
        layer: a Flax module without a parent, `(x, layout, *constants) -> x`.
        axes: (name of a map, axis of its kernel that is in parts), of one layer.
        group: the devices that hold the parts.
        products: the dtype that kernels are gathered in.
    """

    layer: Any
    axes: tuple[tuple[str, int], ...]
    group: Group
    products: jnp.dtype


class Fixed(NamedTuple):
    """Inputs that all layers share: the block's layout, and constants such as cos and sin.

    No gradient reaches them: they must not depend on what is differentiated.
    """

    layout: Layout
    constants: tuple[jax.Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def pass_through(how: Passing, layers: Params, x: jax.Array, fixed: Fixed) -> jax.Array:
    """x `[T, H]` through all layers → `[T, H]`.

    If there are adapters beside the kernels, they alone have a gradient.

    Args:
        layers: the parameters, stacked on axis 0, kernels in parts.
    """
    return _forward(how, layers, x, fixed)[0]


def _forward(how: Passing, layers: Params, x: jax.Array, fixed: Fixed) -> tuple[jax.Array, Any]:
    count = _count(layers)

    def one(carry: tuple[jax.Array, Params], layer: tuple) -> tuple[tuple, jax.Array]:
        (x, held), (params, number) = carry, layer
        ahead = _gathered(how, layers, (number + 1) % count)
        return (_apply(how, _with(params, held), x, fixed, number), ahead), x

    start = x, _gathered(how, layers, 0)
    (result, _), inputs = jax.lax.scan(one, start, (layers, jnp.arange(count)))
    return result, (layers, inputs, fixed)


def _backward(how: Passing, saved: tuple, gradient: jax.Array) -> tuple[Params, jax.Array, None]:
    layers, inputs, fixed = saved
    count = _count(layers)
    learned = _learned(layers)

    def one(carry: tuple[jax.Array, Params], layer: tuple) -> tuple[tuple, Params]:
        (gradient, held), (params, x, number) = carry, layer
        before = _gathered(how, layers, (number - 1) % count)
        leaves = flatten_dict(params)

        def apply(own: Params, x: jax.Array) -> jax.Array:
            return _apply(how, _with(unflatten_dict(leaves | own), held), x, fixed, number)

        _, back = jax.vjp(apply, {path: leaves[path] for path in learned}, x)
        of_own, gradient = back(gradient)
        return (gradient, before), of_own

    start = gradient, _gathered(how, layers, count - 1)
    steps = layers, inputs, jnp.arange(count)
    (gradient, _), found = jax.lax.scan(one, start, steps, reverse=True)
    of_layers = unflatten_dict({path: found.get(path) for path in flatten_dict(layers)})
    return of_layers, gradient, None


pass_through.defvjp(_forward, _backward)


def _apply(how: Passing, params: Params, x: jax.Array, fixed: Fixed, number: jax.Array):
    layout = fixed.layout.at_depth(number + 1)
    return jnp.asarray(how.layer.apply({"params": params}, x, layout, *fixed.constants))


def _gathered(how: Passing, layers: Params, number: jax.Array | int) -> Params:
    """The whole kernels of one layer, by the names of their maps."""
    found = {}
    for name, axis in how.axes:
        part = jax.lax.dynamic_index_in_dim(layers[name]["kernel"], number, keepdims=False)
        part = part.astype(how.products)
        found[name] = jax.lax.all_gather(part, FSDP, axis=axis, tiled=True)
    return found


def _with(params: Params, held: Params) -> Params:
    whole = {name: params[name] | {HELD: kernel} for name, kernel in held.items()}
    return params | whole


def _learned(layers: Params) -> list[tuple[str, ...]]:
    paths = list(flatten_dict(layers))
    return [path for path in paths if path[-1] in ADAPTER] or paths


def _count(layers: Params) -> int:
    return len(jax.tree.leaves(layers)[0])

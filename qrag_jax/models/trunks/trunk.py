"""The interface of every trunk to pooling, packing and training, and how layers are applied.

The layers' parameters are stored stacked on one axis: few, large arrays for the optimizer, the
checkpoint and the mesh. For the computation `unstack` cuts them apart once, outside any loop. A
scan over stacked layers would copy weights and activations in and out of the stacks in every pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from qrag_jax.errors import InputError
from qrag_jax.models.compute.packing import Layout, padded_layout
from qrag_jax.models.compute.precision import Precision

Params = Any  # a pytree of arrays
WORDS = "word_embeddings"  # leaf of a trunk's parameters: the word table, [V, H]
LAYERS = "layers"  # subtree whose leaves have a leading axis with one entry per layer
OTHER_SIZES = ("head_dim", "max_position_embeddings")  # sizes with a default, in `config.json`

# What a layer stores for its gradient; the rest is computed again.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,  # everything is stored
    "dots": jax.checkpoint_policies.dots_saveable,  # matrix products are stored
    "layers": jax.checkpoint_policies.nothing_saveable,  # only the layer's inputs are stored
}


class TrunkConfig(Protocol):
    """The sizes that callers of a trunk read."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def longest_row(self) -> int: ...


def given_fields(cls: type, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the dataclass `cls` that a parsed `config.json` holds.

    Args:
        cls: a trunk's config; all its fields without a default are sizes.
        config: the parsed `config.json`.
        where: names the file in errors.

    Raises:
        InputError: a field without a default is missing, or a size is not a positive whole number.
    """
    fields = dataclasses.fields(cls)
    given = {f.name: config[f.name] for f in fields if config.get(f.name) is not None}
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    absent = [name for name in required if name not in given]
    if absent:
        raise InputError(f"{where}: the fields {', '.join(absent)} are missing.")
    for name in (*required, *OTHER_SIZES):
        size = given.get(name, 1)
        if type(size) is not int or size < 1:
            raise InputError(
                f"{where}: {name} is {size!r}; it must be a whole number of at least 1, so copy it "
                "from the model's own config.json."
            )
    return given


class Trunk(Protocol):
    """A Flax module from packed word vectors to last hidden states.

    `apply({"params": unstacked}, words [T, H], layout) -> [T, H]`: words are rows of the table
    `WORDS`, placed as in `layout`; at unused places the result is finite but meaningless.
    """

    @property
    def config(self) -> TrunkConfig: ...
    @property
    def precision(self) -> Precision: ...

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters, those under `LAYERS` stacked on a leading axis."""
        ...

    def unstack(self, params: Params, kernel_dtype: jnp.dtype = ...) -> Params:
        """Stacked parameters → the form that `apply` takes, kernels in `kernel_dtype`."""
        ...

    def stack(self, unstacked: Params) -> Params:
        """The inverse of `unstack`, for gradients too."""
        ...

    def hidden_states(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → `[B, L, H]`; `params` stacked."""
        ...

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any: ...
    def clone(self, **updates: Any) -> Any: ...


class LayeredTrunk(nn.Module):
    """Base class of trunks; a subclass defines the computation and which maps are joined.

    Attributes:
        precision: dtypes of the computation; parameters stay float32.
        remat: what is computed again for the gradient, a name of `REMAT_POLICIES`.
    """

    config: Any
    precision: Precision = Precision()
    remat: str = "none"

    def join(self, layer: Params) -> Params:
        """Joins the maps of one layer that are computed as one."""
        return layer

    def split(self, layer: Params) -> Params:
        """The inverse of `join`."""
        return layer

    def hidden_states(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → hidden states `[B, L, H]`.

        `params` are stacked. At positions ≥ length the values are finite but meaningless.
        """
        unstacked = self.unstack(params)
        layout = padded_layout(lengths, tokens.shape[1])
        hidden = self.apply({"params": unstacked}, unstacked[WORDS][tokens.reshape(-1)], layout)
        return jnp.asarray(hidden).reshape(*tokens.shape, -1)

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters, `layers` stacked on a leading axis."""
        words = jnp.zeros((1, self.config.hidden_size))
        params = self.init(key, words, padded_layout(jnp.ones(1, jnp.int32), 1))["params"]
        return self.stack(params)

    def unstack(self, params: Params, kernel_dtype: jnp.dtype = jnp.float32) -> Params:
        """Stacked parameters → the form that `apply` takes: `layers_0`, …, each with joined maps.

        Kernels are converted to `kernel_dtype` here, once, instead of at every use.
        """
        unstacked, layers = cut_layers(params, self.config.num_hidden_layers, kernel_dtype)
        return unstacked | {f"layers_{i}": self.join(layer) for i, layer in enumerate(layers)}

    def stack(self, unstacked: Params) -> Params:
        """The inverse of `unstack`."""
        outside = {name: leaf for name, leaf in unstacked.items() if not name.startswith("layers_")}
        count = self.config.num_hidden_layers
        return stack_layers(
            outside, [self.split(dict(unstacked[f"layers_{i}"])) for i in range(count)]
        )


def layer_params(trunk: nn.Module, number: int, layer: Any) -> Params:
    """The parameters of one layer, made by `layer.init_params` if there are none yet.

    Flax's `param` would compare existing parameters with new ones and refuse adapters beside
    kernels.
    """
    name = f"layers_{number}"
    if trunk.has_variable("params", name):
        return trunk.get_variable("params", name)
    return trunk.param(name, layer.init_params)


@partial(jax.jit, static_argnums=(0, 1))
def apply_layer(
    layer: nn.Module,
    remat: str,
    params: Params,
    x: jax.Array,
    layout: Layout,
    *,
    constants: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """`layer(x, layout, *constants)`. Under jit it is traced once for all layers of one shape.

    Args:
        layer: a module without a parent.
        remat: a name of `REMAT_POLICIES`.
        params: parameters of this layer.
        x: `[T, H]`.
        layout: the block's layout, with the dropout keys of this layer.
        constants: further inputs of every layer, such as cos and sin.
    """

    def apply(params: Params, x: jax.Array) -> jax.Array:
        return jnp.asarray(layer.apply({"params": params}, x, layout, *constants))

    if remat != "none":
        apply = jax.checkpoint(apply, policy=REMAT_POLICIES[remat], prevent_cse=True)
    return apply(params, x)


def cut_layers(params: Params, count: int, kernel_dtype: jnp.dtype) -> tuple[Params, list[Params]]:
    """Stacked parameters → the parameters outside the layers, and those of each layer.

    Kernels of layers are converted to `kernel_dtype` here, once, instead of at every use.
    """

    def cut(path: tuple, leaf: jax.Array, layer: int) -> jax.Array:
        return leaf[layer].astype(kernel_dtype) if path[-1].key == "kernel" else leaf[layer]

    outside = {name: leaf for name, leaf in params.items() if name != LAYERS}
    return outside, [
        jax.tree_util.tree_map_with_path(partial(cut, layer=i), params[LAYERS])
        for i in range(count)
    ]


def stack_layers(outside: Params, layers: list[Params]) -> Params:
    """The inverse of `cut_layers`."""
    return outside | {LAYERS: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}

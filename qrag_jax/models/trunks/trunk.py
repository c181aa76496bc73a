"""The interface of every trunk to pooling, packing and training, and how layers are applied.

The layers' parameters are stored stacked on one axis: few, large arrays for the optimizer, the
checkpoint and the mesh. `prepare` makes the form that is computed with, once, outside any loop.

On accelerators the layers stay stacked and are scanned: XLA compiles one layer instead of all, and
compiling takes minutes there. On CPU they are cut apart and computed one after the other. A scan
would copy weights and activations in and out of the stacks in every pass, which costs more there
than compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qrag_jax.models.compute.linear import side_by_side
from qrag_jax.models.compute.packing import Layout, padded_layout
from qrag_jax.models.compute.precision import Precision
from qrag_jax.runtime.mesh import Rules, everywhere, split_rules

Params = Any  # a pytree of arrays
WORDS = "word_embeddings"  # leaf of a trunk's parameters: the word table, [V, H]
LAYERS = "layers"  # subtree whose leaves have a leading axis with one entry per layer

# What a layer stores for its gradient; the rest is computed again.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,  # everything is stored
    "dots": jax.checkpoint_policies.dots_saveable,  # matrix products are stored
    "layers": jax.checkpoint_policies.nothing_saveable,  # only the layer's inputs are stored
}


class Trunk(nn.Module):
    """Base class of trunks; a subclass defines a layer, what is around, and which maps are joined.

    `apply({"params": prepared}, words [T, H], layout) -> [T, H]`: words are rows of the table
    `WORDS`, placed as in `layout`; at unused places the result is finite but meaningless.

    Attributes:
        precision: dtypes of the computation; parameters stay float32.
        remat: what is computed again for the gradient, a name of `REMAT_POLICIES`.
        scanned: the layers stay stacked and are scanned, else they are computed one by one.
        mesh: that programs run on; None: one device.
    """

    # Maps of a layer that a tensor axis splits: of those that open attention and feed-forward the
    # outputs, of those that close them the inputs.
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    ROWS: ClassVar[tuple[str, ...]] = ()
    # Maps that are stored separately, but computed as one.
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    config: Any
    precision: Precision = Precision()
    remat: str = "none"
    scanned: bool = False
    mesh: Mesh | None = None

    def layer(self) -> Any:
        """The module of every layer, without a parent; every subclass has its own."""
        raise NotImplementedError(f"{type(self).__name__} names no module for its layers")

    def join(self, layer: Params) -> Params:
        """Joins the maps of `FUSED`; of one layer, or of stacked layers."""
        for fused, names in self.FUSED.items():
            layer[fused] = side_by_side([layer.pop(name) for name in names])
        return layer

    def split(self, layer: Params) -> Params:
        """The inverse of `join`."""
        for fused, names in self.FUSED.items():
            for leaf, array in layer.pop(fused).items():
                parts = jnp.split(array, self.ends(fused), axis=-1)
                for name, part in zip(names, parts, strict=True):
                    layer.setdefault(name, {})[leaf] = part
        return layer

    def ends(self, fused: str) -> Any:
        """Where a map of `FUSED` is cut; a number: into so many equal parts."""
        return len(self.FUSED[fused])

    @classmethod
    def partition_rules(cls) -> Rules:
        """How parameters are split over a mesh (see `runtime.mesh`)."""
        return split_rules(cls.COLUMNS, cls.ROWS)

    def make_words(self) -> None:
        """For `setup`: makes the word table. `apply` takes rows of it and not the table."""
        if self.is_initializing():
            sizes = self.config.vocab_size, self.config.hidden_size
            self.param(WORDS, nn.initializers.normal(0.02), sizes)

    def layers_params(self) -> Any:
        """For `setup`: the parameters of the layers, stacked or one by one; made if there are none.

        Flax's `param` would compare existing parameters with new ones and refuse adapters beside
        kernels.
        """
        if self.scanned:
            return self.get_variable("params", LAYERS)
        names = [f"{LAYERS}_{i}" for i in range(self.config.num_hidden_layers)]
        return [
            self.get_variable("params", name)
            if self.has_variable("params", name)
            else self.param(name, self.layer().init_params)
            for name in names
        ]

    def through_layers(
        self, layers: Any, x: jax.Array, layout: Layout, constants: tuple[jax.Array, ...] = ()
    ) -> jax.Array:
        """x `[T, H]` through all layers; arguments as those of `apply_layer`.

        Args:
            layers: what `layers_params` gave.
        """
        module = self.layer()

        def one(x: jax.Array, layer: tuple[Params, Any]) -> tuple[jax.Array, None]:
            # Each device goes on with rows of its own: kernels are gathered, not activations.
            x, (params, depth) = everywhere(self.mesh, x), layer
            of_layer = layout.at_depth(depth)
            return apply_layer(module, self.remat, params, x, of_layer, constants=constants), None

        if self.scanned:
            depths = jnp.arange(1, self.config.num_hidden_layers + 1)
            return jax.lax.scan(one, x, (layers, depths))[0]
        for depth, params in enumerate(layers, 1):
            x, _ = one(x, (params, depth))
        return x

    def hidden_states(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → hidden states `[B, L, H]`.

        `params` are stacked. At positions ≥ length the values are finite but meaningless.
        """
        prepared = self.prepare(params)
        layout = padded_layout(lengths, tokens.shape[1])
        hidden = self.apply({"params": prepared}, prepared[WORDS][tokens.reshape(-1)], layout)
        return jnp.asarray(hidden).reshape(*tokens.shape, -1)

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters, `layers` stacked on a leading axis."""
        one_by_one = self.clone(scanned=False)
        words = jnp.zeros((1, self.config.hidden_size))
        params = one_by_one.init(key, words, padded_layout(jnp.ones(1, jnp.int32), 1))["params"]
        return one_by_one.as_stored(params)

    def prepare(self, params: Params, kernel_dtype: jnp.dtype = jnp.float32) -> Params:
        """Stacked parameters → the form that `apply` takes: each layer with joined maps.

        The layers stay under `LAYERS` if they are scanned; else they are `layers_0`, …. Kernels
        are converted to `kernel_dtype` here, once, instead of at every use.
        """
        outside = {name: leaf for name, leaf in params.items() if name != LAYERS}

        def layers(number: int | None = None) -> Params:
            def taken(path: tuple, leaf: jax.Array) -> jax.Array:
                leaf = leaf if number is None else leaf[number]
                return leaf.astype(kernel_dtype) if path[-1].key == "kernel" else leaf

            return self.join(jax.tree_util.tree_map_with_path(taken, params[LAYERS]))

        if self.scanned:
            return outside | {LAYERS: layers()}
        return outside | {f"{LAYERS}_{i}": layers(i) for i in range(self.config.num_hidden_layers)}

    def as_stored(self, prepared: Params) -> Params:
        """The inverse of `prepare`, but for the dtype."""
        if self.scanned:
            return prepared | {LAYERS: self.split(dict(prepared[LAYERS]))}
        names = [f"{LAYERS}_{i}" for i in range(self.config.num_hidden_layers)]
        outside = {name: leaf for name, leaf in prepared.items() if name not in names}
        layers = [self.split(dict(prepared[name])) for name in names]
        return outside | {LAYERS: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


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
        layout: the block's layout, with the dropout keys of this layer.
        constants: further inputs of every layer, such as cos and sin.
    """

    def apply(params: Params, x: jax.Array) -> jax.Array:
        return jnp.asarray(layer.apply({"params": params}, x, layout, *constants))

    if remat != "none":
        apply = jax.checkpoint(apply, policy=REMAT_POLICIES[remat], prevent_cse=True)
    return apply(params, x)

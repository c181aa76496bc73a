"""The interface of every trunk to pooling, packing and training, and how layers are applied.

The layers' parameters are stored stacked on one axis: few, large arrays for the optimizer, the
checkpoint and the mesh. `prepare` makes the form that is computed with, once, outside any loop.

On accelerators the layers stay stacked and are scanned: XLA compiles one layer instead of all, and
compiling takes minutes there. On CPU they are cut apart and computed one after the other. A scan
would copy weights and activations in and out of the stacks in every pass, which costs more there
than compiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.errors import InputError
from qrag_jax.models.compute.group import FSDP, TENSOR, Group, used_by_all, whole
from qrag_jax.models.compute.linear import ADAPTER, LORA_A, LORA_KEY, side_by_side
from qrag_jax.models.compute.packing import Layout, padded_layout
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.prefetch import Fixed, Passing, pass_through
from qrag_jax.runtime.mesh import Rules, split_rules

Params = Any  # a pytree of arrays
WORDS = "word_embeddings"  # leaf of a trunk's parameters: the word table, [V, H]
LAYERS = "layers"  # subtree whose leaves have a leading axis with one entry per layer

# What a layer stores for its gradient; the rest is computed again.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,  # everything is stored
    "dots": jax.checkpoint_policies.dots_saveable,  # matrix products are stored
    "layers": jax.checkpoint_policies.nothing_saveable,  # only the layer's inputs are stored
}


class SplitMaps(NamedTuple):
    """Maps of a layer that tensor parallelism splits, by name; none: it cannot be split.

    Attributes:
        columns: maps of which it splits the outputs. They open attention and feed-forward.
        rows: maps of which it splits the inputs. They close attention and feed-forward.
        norms: norms that are applied to parts, such as those of single heads.
        tables: outside the layers, tables of which a few rows are used: they stay in parts.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


class Trunk(nn.Module):
    """Base class of trunks; a subclass defines a layer, what is around, and which maps are joined.

    `apply({"params": prepared}, words [T, H], layout) -> [T, H]`: words are rows of the table
    `WORDS`, placed as in `layout`; at unused places the result is finite but meaningless.

    Attributes:
        precision: dtypes of the computation; parameters stay float32.
        remat: what is computed again for the gradient, a name of `REMAT_POLICIES`.
        scanned: the layers stay stacked and are scanned, else they are computed one by one.
        group: the devices that hold the parameters together.
    """

    SPLIT: ClassVar[SplitMaps] = SplitMaps(tables=(WORDS,))
    # Maps that are stored separately, but computed as one.
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Sizes that a tensor axis must divide, by their name in `config.json`.
    SHARED_SIZES: ClassVar[tuple[str, ...]] = ()
    # Whether `through_layers` gets constants that are computed from parameters.
    LEARNED_CONSTANTS: ClassVar[bool] = False

    config: Any
    precision: Precision = Precision()
    remat: str = "none"
    scanned: bool = False
    group: Group = Group()

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
        return split_rules(cls.SPLIT.columns, cls.SPLIT.rows)

    def on(self, group: Group) -> Self:
        """The trunk as the devices of a group compute it."""
        parts = group.tensor
        field = f"config.runtime.mesh has a tensor axis of {parts}"
        if parts > 1 and not self.SPLIT.columns:
            raise InputError(
                f"{field}, but the layers of this model cannot be computed in parts: queries, keys "
                "and values are one map in its files; use the fsdp axis."
            )
        for name in self.SHARED_SIZES:
            if (size := getattr(self.config, name)) % parts:
                raise InputError(
                    f"{field}, which does not divide {size}, the model's {name}; use a divisor of "
                    "it, and the fsdp axis for the other devices."
                )
        return self.clone(group=group)

    def for_use(self, params: Params) -> Params:
        """The parts of stacked parameters that a device holds → what `prepare` takes.

        Inside a shard_map it gathers what is small; kernels and word tables stay in parts: `linear`
        gathers kernels where they are used, and `group.look_up` takes rows from tables. Its
        gradient sums over the group.
        """
        group, maps = self.group, self.SPLIT
        if group.size == 1:
            return params
        known = flatten_dict(_shapes(self.clone(group=Group())))
        shapes = {path: leaf.shape for path, leaf in known.items()}

        def of_leaf(path: tuple[str, ...], leaf: jax.Array) -> jax.Array:
            (*place, name), owner = path, path[-2] if len(path) > 1 else ""
            if name == LORA_KEY:
                return leaf
            if name == "kernel" or name in maps.tables:
                parts_of = group.tensor if name == "kernel" else 1
                in_parts = leaf.size * parts_of < math.prod(shapes[path])
                return leaf if in_parts else used_by_all(FSDP, leaf)
            axis, parts = -1, maps.columns
            if name == LORA_A:
                axis, parts = -2, maps.rows
            # The inputs of A and the outputs of B are those of the kernel.
            size = shapes[*place, "kernel" if name in ADAPTER else name][axis]
            in_parts = group.tensor > 1 and owner in parts
            if leaf.shape[axis] == size // (group.tensor if in_parts else 1):
                leaf = used_by_all(FSDP, leaf)
            else:
                leaf = whole(group, leaf.ndim + axis, leaf)
            # What is whole along `tensor`, but multiplies parts or makes parts of a sum.
            partly = owner in maps.norms or (name in ADAPTER and not in_parts)
            return used_by_all(TENSOR, leaf) if group.tensor > 1 and partly else leaf

        leaves = flatten_dict(params)
        return unflatten_dict({path: of_leaf(path, leaf) for path, leaf in leaves.items()})

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
        ahead = self.scanned and self.group.fsdp > 1 and self.remat == "layers"
        if ahead and not self.LEARNED_CONSTANTS:  # no gradient reaches constants there
            how = Passing(module, self._axes_in_parts(layers), self.group, self.precision.products)
            return pass_through(how, unfreeze(layers), x, Fixed(layout, constants))

        def one(x: jax.Array, layer: tuple[Params, Any]) -> tuple[jax.Array, None]:
            params, depth = layer
            of_layer = layout.at_depth(depth)
            return apply_layer(module, self.remat, params, x, of_layer, constants=constants), None

        if self.scanned:
            depths = jnp.arange(1, self.config.num_hidden_layers + 1)
            return jax.lax.scan(one, x, (layers, depths))[0]
        for depth, params in enumerate(layers, 1):
            x, _ = one(x, (params, depth))
        return x

    def _axes_in_parts(self, layers: Params) -> tuple[tuple[str, int], ...]:
        """The maps whose kernels are in parts over `fsdp`, and the axis of one layer's kernel."""
        known, parts = _shapes(self.clone(group=Group()))[LAYERS], self.group.tensor
        found = []
        for name, leaves in layers.items():
            if "kernel" not in leaves:
                continue
            # Maps that are joined are not known by their new name; their input is x.
            shape = known[name]["kernel"].shape if name in known else (self.config.hidden_size, 0)
            inputs = shape[-2] // (parts if name in self.SPLIT.rows else 1)
            outputs = shape[-1] // (parts if name in self.SPLIT.columns else 1)
            if leaves["kernel"].shape[-2] != inputs:
                found.append((name, 0))
            elif name in known and leaves["kernel"].shape[-1] != outputs:
                found.append((name, 1))
        return tuple(found)

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
        one_by_one = self.clone(scanned=False, group=Group())
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


@cache
def _shapes(trunk: Trunk) -> Params:
    return jax.eval_shape(trunk.init_params, jax.random.key(0))


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

"""Which parameter is split over which devices: rules by name, and what they mean on the mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import InputError

FSDP = "fsdp"  # the mesh axis parameters are split over, and the strategy that splits them
REPLICATE = "replicate"
STRATEGIES = (REPLICATE, FSDP)
BATCH_AXES = ("data", FSDP)
# Elements from which an array is split: below, its copies cost less than gathering it.
LEAST_SPLIT = 2**16

Rules = Sequence[tuple[str, str]]


def check_rules(rules: Any) -> None:
    """Refuses rules that are not (regex, strategy) pairs.

    Raises:
        InputError: names config.runtime.sharding and the rule.
    """
    field = "config.runtime.sharding"
    if not isinstance(rules, tuple | list):
        raise InputError(f'{field} is {rules!r}; give pairs, for example ((".*", "fsdp"),).')
    for rule in rules:
        well_formed = isinstance(rule, tuple | list) and len(rule) == 2
        if not well_formed or not all(isinstance(part, str) for part in rule):
            raise InputError(
                f"{field} holds {rule!r}, which is not a pair (regex, strategy); give pairs, for "
                'example ((".*", "fsdp"),).'
            )
        pattern, strategy = rule
        if strategy not in STRATEGIES:
            raise InputError(
                f"{field} holds the unknown strategy {strategy!r} for {pattern!r}; use one of "
                f"{', '.join(STRATEGIES)}."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"{field} holds {pattern!r}, which is not a regular expression ({error}); write "
                "one that is found in the names it is for."
            ) from None


def shardings_of(mesh: Mesh, rules: Rules, tree: Any, params: Any) -> Any:
    """Where every array of `tree` lives.

    The first rule whose regex is found in a parameter's path (such as `layers/query/kernel`)
    gives its strategy; without one it is replicated. Arrays of `tree` that stand for a
    parameter (its target, its moments in the optimizer), which is known by their path's end and
    their shape, live where it lives. All others are replicated.

    Args:
        rules: as `check_rules` allows.
        tree: arrays or shapes, for example of the whole training state.
        params: arrays or shapes of the parameters, two towers stacked on axis 0.

    Returns:
        a tree like `tree` of `NamedSharding`s.
    """
    specs = {
        (_name(path), leaf.shape): _spec(mesh, rules, _name(path), leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # The longest end of the path first: `layers/norm/scale` may stand beside `norm/scale`.
        ends = ((_name(path[start:]), leaf.shape) for start in range(len(path)))
        return NamedSharding(mesh, next((specs[e] for e in ends if e in specs), PartitionSpec()))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def specs_of(shardings: Any) -> Any:
    """The PartitionSpecs of a tree of shardings, as `shard_map` takes them."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def gather(tree: Any, specs: Any) -> Any:
    """Inside a shard_map: the whole arrays from the parts that `specs` leave on each device."""

    def whole(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        axis = _split_axis(spec)
        return leaf if axis is None else jax.lax.all_gather(leaf, FSDP, axis=axis, tiled=True)

    return jax.tree.map(whole, tree, specs)


def sum_to_parts(tree: Any, specs: Any) -> Any:
    """Inside a shard_map: sums whole arrays over the batch axes, leaving each device its part."""

    def part(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        axis = _split_axis(spec)
        if axis is None:
            return jax.lax.psum(leaf, BATCH_AXES)
        # Scattered first: the other axes then sum only parts.
        leaf = _sum_scatter(leaf, axis)
        return jax.lax.psum(leaf, [name for name in BATCH_AXES if name != FSDP])

    return jax.tree.map(part, tree, specs)


def _sum_scatter(leaf: jax.Array, axis: int) -> jax.Array:
    if jax.default_backend() == "cpu" and jax.distributed.is_initialized():
        # Between CPU hosts XLA's reduce-scatter, by gloo, at times returns wrong values at the
        # end of the first part (github.com/jax-ml/jax/issues/40830); its all-reduce does not.
        size = leaf.shape[axis] // jax.lax.psum(1, FSDP)
        start = size * jax.lax.axis_index(FSDP)
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(leaf, FSDP), start, size, axis)
    return jax.lax.psum_scatter(leaf, FSDP, scatter_dimension=axis, tiled=True)


def _spec(mesh: Mesh, rules: Rules, name: str, shape: tuple[int, ...]) -> PartitionSpec:
    parts = mesh.shape[FSDP]
    strategy = next((rule for pattern, rule in rules if re.search(pattern, name)), REPLICATE)
    if strategy == REPLICATE or parts == 1 or math.prod(shape) < LEAST_SPLIT:
        return PartitionSpec()
    fitting = [axis for axis, size in enumerate(shape) if size % parts == 0]
    if not fitting:
        return PartitionSpec()
    # The towers' axis last: a device without its share of one tower has all of the other.
    axis = max(fitting, key=lambda axis: (axis > 0, shape[axis]))
    return PartitionSpec(*[None] * axis, FSDP)


def _split_axis(spec: PartitionSpec) -> int | None:
    return spec.index(FSDP) if FSDP in spec else None


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")

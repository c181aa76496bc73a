"""Splits parameters over the devices of a mesh, by rules for parameter names.

Two axes of the mesh split parameters. `fsdp` splits the largest dimension that it divides. `tensor`
splits the dimension that tensor parallelism splits (Shoeybi et al., arXiv 1909.08053): the outputs
of maps that open a block, and the inputs of maps that close a block. If `tensor` does not divide
that dimension, it splits the largest other one. Both axes only say where parameters are stored. For
the computation the parameters are gathered, and each device computes with a part of the batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.runtime.mesh import AXES
from qrag_jax.runtime.platform import Platform

BATCH_AXES = AXES  # a batch is split over every axis of the mesh
DATA, FSDP, TENSOR = AXES
MODEL = "model"  # this strategy stands for the model's own rules
REPLICATE, COLUMN, ROW = "replicate", "column", "row"
STRATEGIES = (MODEL, REPLICATE, FSDP, COLUMN, ROW)
# The dimension that is split over `tensor`. The strategy FSDP splits over the axis `fsdp` alone.
TENSOR_SPLITS = {COLUMN: -1, ROW: -2}
ALL_SPLIT = ((".*", FSDP),)
# Arrays with fewer elements are not split: their copies cost less than gathering them.
LEAST_SPLIT = 2**16

Rules = Sequence[tuple[str, Any]]


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


def resolve(rules: Rules, own: Rules) -> Rules:
    """Replaces the strategy "model" in the rules by the rules of the model, `own`."""
    return tuple((pattern, own if rule == MODEL else rule) for pattern, rule in rules)


def shardings_of(mesh: Mesh, rules: Rules, tree: Any, params: Any) -> Any:
    """The sharding of every array of `tree`.

    The first rule whose regex is found in a parameter's path (such as `layers/query/kernel`)
    gives its strategy. A parameter without a rule is replicated. Some arrays of `tree` belong to a
    parameter: its copy in the target network, its moments in the optimizer. They are
    recognised by the end of their path and by their shape, and are placed like the parameter.
    All others are replicated.

    Args:
        rules: as `resolve` returns them; instead of a strategy there may be further rules.
        tree: arrays or shapes, for example of the whole training state.
        params: arrays or shapes of the parameters: both towers stacked on axis 0, or one frozen
            tower.

    Returns:
        A tree like `tree` of `NamedSharding`s.
    """
    specs = {
        (_name(path), leaf.shape): _spec(mesh, rules, _name(path), leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # Longest end of the path first, because `layers/norm/scale` may exist beside `norm/scale`.
        ends = ((_name(path[start:]), leaf.shape) for start in range(len(path)))
        return NamedSharding(mesh, next((specs[e] for e in ends if e in specs), PartitionSpec()))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def specs_of(shardings: Any) -> Any:
    """The PartitionSpecs of a tree of shardings, as `shard_map` takes them."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def gather(tree: Any, specs: Any) -> Any:
    """Inside a shard_map: gathers whole arrays from the parts that `specs` put on each device."""

    def whole(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        for axis, name in _split_axes(spec):
            leaf = jax.lax.all_gather(leaf, name, axis=axis, tiled=True)
        return leaf

    return jax.tree.map(whole, tree, specs)


def sum_to_parts(tree: Any, specs: Any, platform: Platform) -> Any:
    """Inside a shard_map: sums whole arrays over the batch axes; each device keeps its part.

    Args:
        tree: the arrays, whole on every device.
        specs: how the sums are split.
        platform: the devices of the mesh.
    """

    def part(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        split = _split_axes(spec)
        for axis, name in split:  # scatter first, so that the other axes sum only parts
            leaf = _sum_scatter(leaf, axis, name, platform)
        scattered = [name for _, name in split]
        return jax.lax.psum(leaf, [name for name in BATCH_AXES if name not in scattered])

    return jax.tree.map(part, tree, specs)


def _sum_scatter(leaf: jax.Array, axis: int, name: str, platform: Platform) -> jax.Array:
    if platform.on_cpu and jax.distributed.is_initialized():
        # Between CPU hosts, XLA's reduce-scatter (by gloo) sometimes returns wrong values at the
        # end of the first part (github.com/jax-ml/jax/issues/40830). Its all-reduce does not.
        size = leaf.shape[axis] // jax.lax.psum(1, name)
        start = size * jax.lax.axis_index(name)
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(leaf, name), start, size, axis)
    return jax.lax.psum_scatter(leaf, name, scatter_dimension=axis, tiled=True)


def _spec(mesh: Mesh, rules: Rules, name: str, shape: tuple[int, ...]) -> PartitionSpec:
    strategy = _strategy(rules, name)
    if strategy == REPLICATE or math.prod(shape) < LEAST_SPLIT:
        return PartitionSpec()
    split: dict[int, str] = {}

    def take(mesh_axis: str, wanted: int | None) -> None:
        parts = mesh.shape[mesh_axis]
        fitting = [a for a, size in enumerate(shape) if size % parts == 0 and a not in split]
        if parts > 1 and fitting:
            # Axis 0 (the towers) is split last: such a split gives a device all of one tower.
            best = max(fitting, key=lambda axis: (axis == wanted, axis > 0, shape[axis]))
            split[best] = mesh_axis

    if strategy in TENSOR_SPLITS:
        take(TENSOR, len(shape) + TENSOR_SPLITS[strategy])
    take(FSDP, None)
    return PartitionSpec(*(split.get(axis) for axis in range(max(split, default=-1) + 1)))


def _strategy(rules: Rules, name: str) -> str:
    found = next((rule for pattern, rule in rules if re.search(pattern, name)), REPLICATE)
    return found if isinstance(found, str) else _strategy(found, name)


def _split_axes(spec: PartitionSpec) -> list[tuple[int, str]]:
    return [(axis, name) for axis, name in enumerate(spec) if name is not None]


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")

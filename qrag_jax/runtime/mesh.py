"""The mesh of devices, and what of arrays lies where on it.

Two axes of the mesh split parameters. `fsdp` says where large arrays are stored: every kernel is
gathered when it is used (Rajbhandari et al., arXiv 1910.02054, ZeRO stage 3). `tensor` also says
where they are computed (Shoeybi et al., arXiv 1909.08053): a device has some heads, and some of the
features inside a feed-forward. The models' own rules name the maps that open such a part
("column") and those that close it ("row"). XLA's partitioner places what devices send each other;
programs only say what lies where.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.shard_alike import shard_alike
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import InputError

AXES = DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
BATCH_AXES = AXES  # a batch is split over every axis of the mesh
REPLICATE, COLUMN, ROW = "replicate", "column", "row"
LAYERS = "layers"  # in the names of parameters of layers
# The dimensions of an array that may be split, the first free one over each axis. The inputs of
# kernels are split rather than the outputs, because maps that are computed as one are joined along
# their outputs. Vectors of layers are whole: they are small, and every layer needs them.
_KERNEL = {COLUMN: ((-1, TENSOR), (-2, FSDP)), ROW: ((-2, TENSOR), (-1, FSDP)), FSDP: ((-2, FSDP),)}
_BIAS = {COLUMN: ((-1, TENSOR),), ROW: (), FSDP: ()}
_LORA_A = {COLUMN: ((-2, FSDP),), ROW: ((-2, TENSOR), (-2, FSDP)), FSDP: ((-2, FSDP),)}
_LORA_B = {COLUMN: ((-1, TENSOR), (-1, FSDP)), ROW: ((-1, FSDP),), FSDP: ((-1, FSDP),)}
_IN_LAYERS = {"kernel": _KERNEL, "bias": _BIAS, "lora_a": _LORA_A, "lora_b": _LORA_B}
_OUTSIDE = ((-1, FSDP),)
ALL_SPLIT = ((".*", FSDP),)
# Arrays with fewer elements are not split over `fsdp`: their copies cost less than gathering them.
# Kernels always are, because maps that are joined must all be in parts.
LEAST_SPLIT = 2**16

Rules = Sequence[tuple[str, str]]  # a regular expression, and the strategy of what it is found in


def make_mesh(
    shape: tuple[int, int, int] = (-1, 1, 1), devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes `data`, `fsdp`, `tensor`; one size may be -1 (the rest).

    A batch is split over all three. Parameters are copied along `data` and split over the others
    (see `shardings_of`).
    """
    placed = np.array(jax.devices() if devices is None else devices)
    try:
        return Mesh(placed.reshape(shape), AXES)
    except ValueError:
        raise InputError(
            f"config.runtime.mesh is {tuple(shape)} (axes {', '.join(AXES)}), which does not cover "
            f"the {placed.size} devices; let the sizes multiply to it, with -1 for the rest."
        ) from None


def host_mesh(shape: tuple[int, int, int] = (-1, 1, 1)) -> Mesh:
    """The devices of this host alone, if they can hold all parameters as `shape` splits them.

    Hosts then compute without each other, and each gives the numbers that it would give alone.
    Else, or where there is one host, it is the mesh of all devices.
    """
    mesh, devices = make_mesh(shape), jax.local_devices()
    _, fsdp, tensor = mesh.devices.shape
    if not mesh.is_multi_process or len(devices) % (fsdp * tensor):
        return mesh
    return make_mesh((-1, fsdp, tensor), devices)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Puts host arrays on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def put_whole(tree: Any, shardings: Any) -> Any:
    """Places host arrays that every host has whole, and alike; each device gets its part.

    The leaves of `shardings` are for whole branches of the other tree.
    """

    def put(sharding: NamedSharding, branch: Any) -> Any:
        if sharding.is_fully_addressable:
            return jax.device_put(branch, sharding)
        make = jax.make_array_from_callback
        return jax.tree.map(lambda leaf: make(leaf.shape, sharding, leaf.__getitem__), branch)

    return jax.tree.map(put, shardings, tree)


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """Splits a batch of host arrays over the mesh; each of its hosts gives its own episodes."""
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    if not mesh.is_multi_process:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch)


# ---------------------------------------------------------------------- parameters


def split_rules(columns: Sequence[str], rows: Sequence[str]) -> Rules:
    """The rules of a model whose layers have these maps; all else is split over `fsdp`."""
    maps = ((COLUMN, columns), (ROW, rows))
    named = [(f"{LAYERS}/({'|'.join(names)})/", kind) for kind, names in maps if names]
    return (*named, *ALL_SPLIT)


def shardings_of(mesh: Mesh, rules: Rules, tree: Any, params: Any = None) -> Any:
    """The sharding of every array of `tree`.

    The first rule whose regex is found in a parameter's path (such as `layers/query/kernel`)
    gives its strategy. A parameter without a rule is replicated. A parameter's copy in the target
    network and its moments in the optimizer are recognised by the end of their path and by their
    shape, and are placed like it. All other arrays are replicated.

    Args:
        tree: arrays or shapes, for example of the whole training state.
        params: arrays or shapes of the parameters, if `tree` has other arrays, too.
    """
    specs = {
        (_name(path), leaf.shape): _spec(mesh, rules, _name(path), leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree if params is None else params)
    }

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # Longest end of the path first, because `layers/norm/scale` may exist next to `norm/scale`.
        ends = ((_name(path[start:]), leaf.shape) for start in range(len(path)))
        return NamedSharding(mesh, next((specs[e] for e in ends if e in specs), PartitionSpec()))

    return jax.tree_util.tree_map_with_path(sharding, tree)


# ---------------------------------------------------------------------- in programs

# Rows are computed in parts over `data` and `fsdp`; devices along `tensor` compute the same rows.
# What each device has is on two leading axes, `[data, fsdp, …]`.

Tree = TypeVar("Tree")


def row_devices(mesh: Mesh | None) -> tuple[int, int]:
    """Devices along `data` and `fsdp`; without a mesh there is one."""
    return (1, 1) if mesh is None else (mesh.shape[DATA], mesh.shape[FSDP])


def by_device(mesh: Mesh | None, tree: Tree) -> Tree:
    """Under jit: arrays `[data, fsdp, …]`, of which each device has its own."""
    return _placed(mesh, tree, PartitionSpec(DATA, FSDP))


def by_row(mesh: Mesh | None, array: jax.Array) -> jax.Array:
    """Under jit: the array, split over the whole mesh along axis 0 if that is divisible."""
    whole = mesh is None or len(array) % mesh.size
    return array if whole else _placed(mesh, array, PartitionSpec(BATCH_AXES))


def everywhere(mesh: Mesh | None, tree: Tree) -> Tree:
    """Under jit: arrays that every device has whole; under `on_each`, of its own part."""
    return _placed(mesh, tree, PartitionSpec())


def _placed(mesh: Mesh | None, tree: Tree, spec: PartitionSpec) -> Tree:
    if mesh is None or mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))


def on_each(axis: str | tuple[str, ...], compute: Callable[..., Tree], *arrays: Any) -> Tree:
    """`compute` by each device along axes of the mesh, of its part of arrays `[devices, …]`."""
    if len(jax.tree.leaves(arrays)[0]) > 1:
        return jax.vmap(compute, spmd_axis_name=axis)(*arrays)
    alone = compute(*jax.tree.map(lambda leaf: leaf[0], arrays))
    return jax.tree.map(lambda leaf: leaf[None], alone)


def zeros_like(mesh: Mesh | None, tree: Tree) -> Tree:
    """Under jit: float32 zeros `[data, …]`, placed as the leaves, for gradients of each device."""
    replicas, _ = row_devices(mesh)

    def zeros(leaf: jax.Array) -> jax.Array:
        nothing = jnp.zeros((replicas, *leaf.shape), jnp.float32)
        if mesh is None or mesh.size == 1:
            return nothing
        return shard_alike(jnp.broadcast_to(leaf, nothing.shape), nothing)[1]

    return jax.tree.map(zeros, tree)


def _spec(mesh: Mesh, rules: Rules, name: str, shape: tuple[int, ...]) -> PartitionSpec:
    strategy = next((kind for pattern, kind in rules if re.search(pattern, name)), REPLICATE)
    dimensions: tuple[tuple[int, str], ...] = () if strategy == REPLICATE else _OUTSIDE
    *place, leaf = name.split("/")
    if LAYERS in place:
        dimensions = _IN_LAYERS.get(leaf, {}).get(strategy, ())
    split: dict[int, str] = {}
    for dimension, axis in dimensions:
        parts = mesh.shape[axis]
        small = axis == FSDP and leaf != "kernel" and math.prod(shape) < LEAST_SPLIT
        if parts == 1 or small or dimension in split:
            continue
        if not shape[dimension] % parts:
            split[dimension] = axis
        elif LAYERS in place:
            raise InputError(
                f"config.runtime.mesh has {parts} devices along {axis}, which do not divide "
                f"{shape[dimension]}, a size of {name} {list(shape)}; use a divisor of it."
            )
    axes = [split.get(dimension) for dimension in range(-len(shape), 0)]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """Section `runtime`."""

    mesh: tuple[int, int, int] = (-1, 1, 1)  # devices along data, fsdp, tensor; -1: the rest
    # Programs of a GPU that give the same numbers every time, as a resumed run needs to end bit for
    # bit like one that was never stopped; it costs time there. A CPU's programs do so anyway.
    deterministic: bool = True

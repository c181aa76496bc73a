"""Makes the device mesh and places arrays on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import InputError

AXES = ("data", "fsdp", "tensor")


def make_mesh(
    shape: tuple[int, int, int] = (-1, 1, 1), devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes `data`, `fsdp`, `tensor`; one size may be -1 (the rest).

    A batch is split over all three. Parameters are copied along `data` and split over the others
    (see `sharding`).

    Args:
        shape: sizes of the axes.
        devices: those of the mesh; None: all there are.
    """
    placed = np.array(jax.devices() if devices is None else devices)
    sizes = list(shape)
    well_formed = len(shape) == len(AXES) and all(size == -1 or size >= 1 for size in shape)
    if well_formed and sizes.count(-1) == 1:
        known = int(np.prod([size for size in shape if size != -1]))
        sizes[sizes.index(-1)] = placed.size // known
    if not well_formed or -1 in sizes or int(np.prod(sizes)) != placed.size:
        raise InputError(
            f"config.runtime.mesh is {tuple(shape)} (axes {', '.join(AXES)}), which does not cover "
            f"the {placed.size} devices; let the sizes multiply to it, with -1 for the rest."
        )
    return Mesh(placed.reshape(sizes), AXES)


def host_mesh(shape: tuple[int, int, int] = (-1, 1, 1)) -> Mesh:
    """The devices of this host alone, if they can hold all parameters as `shape` splits them.

    Hosts then compute without each other, and each gives the numbers that it would give alone.
    Else, or where there is one host, it is the mesh of all devices.

    Args:
        shape: as `make_mesh` has it, for all devices of all hosts.
    """
    mesh, own = make_mesh(shape), jax.local_devices()
    _, fsdp, tensor = mesh.devices.shape
    if not mesh.is_multi_process or len(own) % (fsdp * tensor):
        return mesh
    return make_mesh((-1, fsdp, tensor), own)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Puts host arrays on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def put_whole(tree: Any, shardings: Any) -> Any:
    """Places host arrays that every host has whole, and alike; each device gets its part.

    Args:
        shardings: a tree whose leaves are for whole branches of the other one.
    """

    def put(sharding: NamedSharding, branch: Any) -> Any:
        if sharding.is_fully_addressable:
            return jax.device_put(branch, sharding)
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__),
            branch,
        )

    return jax.tree.map(put, shardings, tree)


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """Splits a batch of host arrays over the mesh; each of its hosts gives its own episodes."""
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    if not mesh.is_multi_process:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch)

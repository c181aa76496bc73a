"""Where parameters live on the mesh, and how they get there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.models.files.model_folder import StoredLeaf
from qrag_jax.models.heads.embedding import Params
from qrag_jax.runtime.mesh import Rules, shardings_of


def params_shardings(mesh: Mesh, rules: Rules, tower: Params) -> Params:
    """The shardings of both towers' parameters, from the arrays or shapes of one tower."""
    shapes = jax.eval_shape(both, tower)
    return shardings_of(mesh, rules, shapes, shapes)


def base_shardings(mesh: Mesh, rules: Rules, base: Params | None) -> Params | None:
    """The shardings of the one frozen tower that is the base of adapters; None without one."""
    return shardings_of(mesh, rules, base, base)


def shapes_on(tree: Any, shardings: Any) -> Any:
    """As `place`, for devices that are described but not here: shapes, dtypes and shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def both_towers(shardings: Params, tower: Params, second: Params | None = None) -> Params:
    """Two towers, or the adapters of two, placed as in training.

    Args:
        tower: parameters of one tower, or of its adapters; both are copies of it.
        second: as `tower`, of the tower of chunks, if that is another.
    """
    one = of_one_tower(shardings)
    towers = [place(each, one) for each in (tower, second) if each is not None]
    return jax.jit(both, out_shardings=shardings)(*towers)


def both(tower: Params, second: Params | None = None) -> Params:
    """Two towers stacked on axis 0."""
    second = tower if second is None else second
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), tower, second)


def of_one_tower(shardings: Params) -> Params:
    """The shardings of one of two towers."""
    return jax.tree.map(
        lambda both: NamedSharding(both.mesh, PartitionSpec(*both.spec[1:])), shardings
    )


def place(tower: Params, shardings: Params) -> Params:
    """Places one tower on the mesh; each device gets only its part.

    A leaf in files is read a few layers at a time, no more than the size of the largest tensor, and
    each device's part separately. So the host never holds much more than the largest tensor.

    Args:
        tower: host arrays, the same on every host, or `StoredLeaf`s.
    """
    stored = [leaf for leaf in jax.tree.leaves(tower) if isinstance(leaf, StoredLeaf)]
    most = max((leaf.tensor_bytes for leaf in stored), default=0)

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if not isinstance(leaf, StoredLeaf):
            return jax.device_put(leaf, sharding)
        layers, together = len(leaf.tensors), max(1, most // max(1, leaf.tensor_bytes))
        split_by_layers = leaf.stacked and sharding.spec and sharding.spec[0] is not None
        if layers <= together or split_by_layers:
            return _read_parts(leaf, sharding)
        whole = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
        for start in range(0, layers, together):
            part = _read_parts(leaf.layers(start, start + together), sharding)
            # In place, so that a device never holds a second copy of the leaf.
            update = jax.jit(_put_layers, donate_argnums=0, out_shardings=sharding)
            whole = update(whole, part, start).block_until_ready()
        return whole

    return jax.tree.map(put, tower, shardings)


def _put_layers(whole: jax.Array, part: jax.Array, start: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)


def _read_parts(leaf: StoredLeaf, sharding: NamedSharding) -> jax.Array:
    """Reads a leaf onto its devices; the host holds one device's part at a time."""
    parts: dict[str, np.ndarray] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        if str(index) not in parts:  # devices with the same part are mostly neighbours
            parts = {str(index): leaf.read(index or ())}
        arrays.append(jax.device_put(parts[str(index)], device).block_until_ready())
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)

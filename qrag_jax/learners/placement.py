"""Where parameters live on the mesh, how they get there, and a digest that tells them apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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

    Args:
        tower: host arrays, the same on every host, or `StoredLeaf`s, of which the host reads one
            device's part at a time.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        return (_read if isinstance(leaf, StoredLeaf) else jax.device_put)(leaf, sharding)

    return jax.tree.map(put, tower, shardings)


def _read(leaf: StoredLeaf, sharding: NamedSharding) -> jax.Array:
    parts: dict[str, np.ndarray] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        if str(index) not in parts:  # devices with the same part are mostly neighbours
            parts = {str(index): leaf.read(index or ())}
        arrays.append(jax.device_put(parts[str(index)], device).block_until_ready())
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def encoder_key(params: Any, settings: Mapping[str, Any]) -> str:
    """A digest of the parameters and of all other settings that an embedding depends on."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]

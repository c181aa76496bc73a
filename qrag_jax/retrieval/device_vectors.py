"""Puts vectors on the devices of a mesh, each an equal part, if there is room for them."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.retrieval.top_groups import Part
from qrag_jax.retrieval.vectors import Vectors, check_finite
from qrag_jax.runtime.aot import room, shown
from qrag_jax.runtime.mesh import BATCH_AXES

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
STORAGES = (FLOAT32, BFLOAT16, INT8)
_BYTES = {FLOAT32: 4, BFLOAT16: 2, INT8: 1}
_BLOCK_BYTES = 2**28  # that are brought to a device at a time


@dataclasses.dataclass(frozen=True)
class Layout:
    """How passages lie on the devices, in order."""

    count: int
    width: int
    rows: int  # of each device; those beyond `count` belong to no passage
    storage: str

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        scale = 4 if self.storage == INT8 else 0
        return self.rows * (self.width * _BYTES[self.storage] + scale + 1)


def layout_of(vectors: Vectors, storage: str, devices: int, group: int) -> Layout:
    """Equal parts of whole groups of `group` passages."""
    rows = rows_of(len(vectors), devices, group)
    return Layout(len(vectors), vectors.width, rows, storage)


def rows_of(count: int, devices: int, group: int) -> int:
    """Rows of each device for so many passages: whole groups."""
    return -(-max(count, 1) // (devices * group)) * group


def check_room(layout: Layout, working: int, free: int | None) -> None:
    """Refuses vectors that do not fit.

    Args:
        free: bytes of a device; None: unknown.
    """
    needed = layout.bytes + working
    if free is not None and needed > free:
        helps = [f"storage={name}" for name in STORAGES if _BYTES[name] < _BYTES[layout.storage]]
        raise InputError(
            f"{layout.count:,} vectors of {layout.width} numbers in {layout.storage} need "
            f"{shown(needed)} on each device ({shown(layout.bytes)} for themselves), but "
            f"{shown(free)} are free, {shown(needed - free)} too few; "
            f"{' or '.join([*helps, 'more devices'])} would help."
        )


def load(vectors: Vectors, layout: Layout, mesh: Mesh, working: int) -> Part:
    """The vectors on the devices of a mesh; a host reads those of its own devices only.

    They go there block by block, so that the host never holds a device's part
    (`jax.make_array_from_callback` would ask for it whole, which may be all that a host has).
    """
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    total = (layout.rows * mesh.size,)
    places = sharding.addressable_devices_indices_map(total)
    frees = [free for device in places if (free := room(device, len(places))) is not None]
    check_room(layout, working, min(frees, default=None))
    pieces = [
        _of_device(vectors, layout, device, at[0].start or 0)
        for device, at in places.items()
        if at is not None  # as JAX declares it
    ]
    scales = None
    if layout.storage == INT8:
        scales = jax.make_array_from_single_device_arrays(total, sharding, [p[1] for p in pieces])
    rows = jax.make_array_from_single_device_arrays(
        (*total, layout.width), sharding, [p[0] for p in pieces]
    )
    return Part(rows, scales, on_devices(np.ones(layout.count, bool), layout, mesh))


def on_devices(allowed: np.ndarray, layout: Layout, mesh: Mesh) -> jax.Array:
    """A mask bool `[passages]`, as the vectors lie."""
    whole = np.zeros(layout.rows * mesh.size, bool)
    whole[: layout.count] = allowed
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def to_int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors as int8 `[n, D]` and float32 scales `[n]`: the largest number becomes 127."""
    rows = rows.astype(np.float32)
    scales = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
    return np.rint(rows / np.where(scales == 0, 1, scales)[:, None]).astype(np.int8), scales


def _of_device(
    vectors: Vectors, layout: Layout, device: jax.Device, start: int
) -> tuple[jax.Array, jax.Array]:
    """Rows `[R, D]` and scales `[R]` of one device."""
    dtype = {FLOAT32: jnp.float32, BFLOAT16: jnp.bfloat16, INT8: jnp.int8}[layout.storage]
    size = max(_BLOCK_BYTES // (layout.width * 4), 1)
    stop = min(start + layout.rows, layout.count)
    with jax.default_device(device):
        rows = jnp.zeros((layout.rows, layout.width), dtype)
        scales = jnp.zeros(layout.rows, jnp.float32)
        for first, block in vectors.blocks(start, stop, size):
            check_finite(block, "the index", first)
            if layout.storage == INT8:
                block, of_block = to_int8(block)
                scales = _put(scales, of_block, first - start)
            rows = _put(rows, block.astype(dtype), first - start)
    return rows, scales


@partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, block: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, block, first, 0)

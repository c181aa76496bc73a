"""A group of devices that hold one copy of the parameters together, and what they send each other.

All functions but `Group.of` run inside a shard_map over a mesh with the axes of `runtime.mesh`.

Along `fsdp` each device holds a part of every large array and computes with rows of its own. Whole
kernels exist only while they are used (Rajbhandari et al., arXiv 1910.02054, ZeRO stage 3). Along
`tensor` each device computes a part of every layer for the same rows (Shoeybi et al., arXiv
1909.08053, Megatron-LM). Gradients of arrays that a group holds are complete within the group; what
is left is to sum them over `data`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qrag_jax.models.compute.row_sums import add_rows
from qrag_jax.runtime.mesh import AXES
from qrag_jax.runtime.platform import Platform

_, FSDP, TENSOR = AXES
BOTH = (FSDP, TENSOR)


class Group(NamedTuple):
    """Sizes of a group; the default is a device alone.

    Attributes:
        fsdp: f, parts that large arrays are stored in.
        tensor: t, parts that every layer is computed in.
        scatters: whether a reduce-scatter can be trusted. Between CPU hosts XLA's (by gloo)
            sometimes returns wrong values at the end of the first part
            (github.com/jax-ml/jax/issues/40830); its all-reduce does not.
    """

    fsdp: int = 1
    tensor: int = 1
    scatters: bool = True

    @classmethod
    def of(cls, mesh: Mesh) -> Group:
        """The groups of a mesh, which are all alike."""
        between_cpus = Platform.of(mesh).on_cpu and jax.distributed.is_initialized()
        return cls(mesh.shape[FSDP], mesh.shape[TENSOR], not between_cpus)

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.fsdp * self.tensor


# ---------------------------------------------------------------------- arrays in parts over fsdp


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def whole(group: Group, axis: int, part: jax.Array) -> jax.Array:
    """The whole array of which each device of `fsdp` holds a part along `axis`.

    Its gradient is summed over `fsdp`, and each device gets its part of the sum.
    """
    return jax.lax.all_gather(part, FSDP, axis=axis, tiled=True)


def _whole_forward(group: Group, axis: int, part: jax.Array) -> tuple[jax.Array, None]:
    return whole(group, axis, part), None


def _whole_backward(group: Group, axis: int, saved: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (sum_to_part(group, axis, gradient),)


whole.defvjp(_whole_forward, _whole_backward)


def sum_to_part(group: Group, axis: int, array: jax.Array) -> jax.Array:
    """Sums arrays over `fsdp`; each device keeps its part along `axis`."""
    if group.scatters:
        return jax.lax.psum_scatter(array, FSDP, scatter_dimension=axis, tiled=True)
    size = array.shape[axis] // group.fsdp
    start = size * jax.lax.axis_index(FSDP)
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(array, FSDP), start, size, axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def used_by_all(axis_name: str, array: jax.Array) -> jax.Array:
    """The array itself, which all devices along an axis hold and use differently.

    Its gradient is summed over the axis, so that it is complete and the same on all of them.
    """
    return array


used_by_all.defvjp(
    lambda axis_name, array: (array, None),
    lambda axis_name, saved, gradient: (jax.lax.psum(gradient, axis_name),),
)


# ---------------------------------------------------------------------- layers in parts over tensor


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed(axis_name: str, array: jax.Array) -> jax.Array:
    """The sum over an axis; all devices along it go on with the same values.

    So they all have the same gradient, which is passed on as it is.
    """
    return jax.lax.psum(array, axis_name)


summed.defvjp(
    lambda axis_name, array: (summed(axis_name, array), None),
    lambda axis_name, saved, gradient: (gradient,),
)


def first_of_part(group: Group, size: int) -> jax.Array | int:
    """The number, in the whole, of the first of `size` features or heads of this device."""
    return size * jax.lax.axis_index(TENSOR) if group.tensor > 1 else 0


def on_one(group: Group, array: jax.Array) -> jax.Array:
    """The array on the first device along `tensor` and zeros on the others, to be `summed`."""
    if group.tensor == 1:
        return array
    first = jax.lax.axis_index(TENSOR) == 0
    return jnp.where(first, used_by_all(TENSOR, array), 0)


# ---------------------------------------------------------------------- tables in parts over fsdp


def look_up(table: jax.Array, rows: jax.Array, width: int) -> jax.Array:
    """Rows `[T]` of a table `[V, width]` → `[T, width]`.

    If a device holds a part `[V, width/f]`, it looks up its part of every device's rows, and the
    parts are exchanged: the table is never whole anywhere.
    """
    if table.shape[-1] == width:
        return table[rows]
    found = table[jax.lax.all_gather(rows, FSDP, tiled=True)]  # [f·T, width/f]
    return jax.lax.all_to_all(found, FSDP, split_axis=0, concat_axis=1, tiled=True)


def add_to_rows(table: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Adds values `[T, width]` to rows `[T]` of the table of a gradient: that of `look_up`.

    With parts it adds every device's values to this part.
    """
    if table.shape[-1] == values.shape[-1]:
        return add_rows(table, rows, values)
    values = jax.lax.all_to_all(values, FSDP, split_axis=1, concat_axis=0, tiled=True)
    return add_rows(table, jax.lax.all_gather(rows, FSDP, tiled=True), values)


# ---------------------------------------------------------------------- rows dealt to devices

# So that all devices of a group compute blocks of ONE list: every device gathers the rows of its
# group (a few bytes per token) and sorts them by length. Device i of f along `fsdp` then takes
# every f-th row, beginning with row i. So the k-th row is about as long on every device, and blocks
# planned for the longest of these k-th rows fit everywhere. All devices run through the same blocks
# in the same order, hence they may send each other parameters inside the loop over blocks, and each
# has equally much to do. Devices along `tensor` take the same rows.
#
# N is the number of rows of the group, n that of the rows given on a device (N = n·f·t), M = N/f
# that of the rows dealt to a device. A device alone keeps its rows.


def of_group(group: Group, given: jax.Array) -> jax.Array:
    """`[n, …]` given on this device → `[N, …]` of all devices, in their order."""
    return given if group.size == 1 else jax.lax.all_gather(given, BOTH, tiled=True)


def given_here(group: Group, rows: jax.Array) -> jax.Array:
    """The inverse of `of_group`: `[N, …]` → `[n, …]`, those that were given on this device."""
    if group.size == 1:
        return rows
    size = len(rows) // group.size
    return jax.lax.dynamic_slice_in_dim(rows, size * jax.lax.axis_index(BOTH), size)


def dealt(group: Group, rows: jax.Array) -> jax.Array:
    """`[N, …]` in the order by length → `[M, …]`, those that this device computes."""
    if group.fsdp == 1:
        return rows
    hands = rows.reshape(-1, group.fsdp, *rows.shape[1:])
    return jax.lax.dynamic_index_in_dim(hands, jax.lax.axis_index(FSDP), 1, keepdims=False)


def collected(group: Group, rows: jax.Array) -> jax.Array:
    """The inverse of `dealt`: `[M, …]` of every device → `[N, …]` in the order by length."""
    if group.fsdp == 1:
        return rows
    return jax.lax.all_gather(rows, FSDP, axis=1).reshape(-1, *rows.shape[1:])


def longest_dealt(group: Group, lengths: jax.Array) -> jax.Array:
    """Ascending lengths `[N]` → `[M]`, those of the longest k-th row of any device."""
    return jnp.asarray(lengths[group.fsdp - 1 :: group.fsdp])

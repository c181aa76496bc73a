"""Deals the rows of a group of devices out among them, so that all compute blocks of ONE list.

Every device gathers the rows of its group (a few bytes per token) and sorts them by length. Device
i of f along `fsdp` then takes every f-th row, beginning with row i. So the k-th row is about as
long on every device, and blocks planned for the longest of these k-th rows fit everywhere. All
devices run through the same blocks in the same order, hence they may send each other parameters
inside the loop over blocks, and each has equally much to do. Devices along `tensor` take the same
rows.

N is the number of rows of the group, n that of the rows given on a device (N = n·f·t), M = N/f that
of the rows dealt to a device. A device alone keeps its rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.group import BOTH, FSDP, Group


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

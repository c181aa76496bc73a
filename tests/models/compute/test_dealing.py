"""Rows dealt out to a group of devices, and tables in parts, against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from qrag_jax.models.compute.dealing import (
    collected,
    dealt,
    given_here,
    longest_dealt,
    of_group,
)
from qrag_jax.models.compute.group import FSDP, Group, add_to_rows, look_up
from qrag_jax.runtime.sharding import BATCH_AXES
from tests.devices import mesh_of

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(0, 9, 16).astype(np.int32)
every_shape = pytest.mark.parametrize("shape", [(1, 4, 1), (2, 2, 2)])


def on_devices(
    shape: tuple[int, int, int], compute: Callable[..., Any], *arrays: Any, specs: Any, out: Any
) -> Any:
    """`compute(group, *arrays)` on every device of a mesh."""
    mesh = mesh_of(*shape)
    group = Group.of(mesh)
    program = jax.shard_map(
        lambda *parts: compute(group, *parts),
        mesh=mesh,
        in_specs=specs,
        out_specs=out,
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(program)(*arrays))


@every_shape
def test_rows_are_dealt_and_come_back(shape: tuple[int, int, int]) -> None:
    data, fsdp, tensor = shape
    by_row = PartitionSpec(BATCH_AXES)

    def deal(group: Group, lengths: jax.Array) -> tuple[jax.Array, ...]:
        every = of_group(group, lengths)
        order = jnp.argsort(every, stable=True)
        own, planned = dealt(group, every[order]), longest_dealt(group, every[order])
        back = jnp.zeros_like(every).at[order].set(collected(group, own))
        return own[None], planned[None], given_here(group, back)

    owns, plans, back = on_devices(shape, deal, LENGTHS, specs=by_row, out=(by_row, by_row, by_row))
    np.testing.assert_array_equal(back, LENGTHS)
    of_groups = LENGTHS.reshape(data, -1)
    for number, (own, plan) in enumerate(zip(owns, plans, strict=True)):
        group, place = divmod(number, fsdp * tensor)
        ordered = np.sort(of_groups[group])
        mine = place // tensor  # devices along `tensor` have the same rows
        np.testing.assert_array_equal(own, ordered[mine::fsdp])
        # One plan for the group, which holds the k-th row of each of its devices.
        wanted = [max(ordered[k * fsdp : (k + 1) * fsdp]) for k in range(len(own))]
        np.testing.assert_array_equal(plan, wanted)


def test_a_device_alone_keeps_its_rows() -> None:
    rows, alone = jnp.asarray(LENGTHS), Group()
    for same in (of_group, given_here, dealt, collected, longest_dealt):
        np.testing.assert_array_equal(same(alone, rows), LENGTHS)


@every_shape
@pytest.mark.parametrize("split", [True, False])
def test_tables_in_parts(shape: tuple[int, int, int], split: bool) -> None:
    data, fsdp, _ = shape
    table = RNG.standard_normal((11, 8)).astype(np.float32)
    groups = data * fsdp  # along `tensor` the same rows are looked up
    rows = RNG.integers(0, 11, (groups, 5)).astype(np.int32)
    values = RNG.standard_normal((groups, 5, 8)).astype(np.float32)
    of_table = PartitionSpec(None, FSDP) if split else PartitionSpec()
    by_group = PartitionSpec(("data", FSDP))

    def compute(_: Group, table: jax.Array, rows: jax.Array, values: jax.Array) -> tuple:
        found = look_up(table, rows[0], 8)
        sums = add_to_rows(jnp.zeros_like(table), rows[0], values[0])
        if not split and fsdp > 1:
            sums = jax.lax.psum(sums, FSDP)
        return found[None], jax.lax.psum(sums, "data")

    found, sums = on_devices(
        shape,
        compute,
        table,
        rows,
        values,
        specs=(of_table, by_group, by_group),
        out=(by_group, of_table),
    )
    np.testing.assert_array_equal(found, table[rows])
    expected = np.zeros_like(table)
    np.add.at(expected, rows.reshape(-1), values.reshape(-1, 8))
    np.testing.assert_allclose(sums, expected, atol=1e-5)

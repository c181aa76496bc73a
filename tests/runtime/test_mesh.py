"""Sharding rules: which parameter is split where; moments: learners/test_sharded_steps.py."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.runtime.mesh import AXES, host_mesh, make_mesh, replicate, shard_batch, shardings_of


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.float32)


def specs(strategy: str, tree: Any, fsdp: int, tensor: int) -> Any:
    mesh = AbstractMesh((2, fsdp, tensor), AXES)
    found = shardings_of(mesh, ((".*", strategy),), tree, tree)
    return jax.tree.map(lambda each: each.spec, found)


KERNEL, B = (2, 12, 768, 3072), (2, 12, 16, 3072)
LAST = (None, None, None)


def test_which_dimensions_of_a_map() -> None:
    for strategy, leaf, sizes, expected in (
        ("column", "kernel", KERNEL, (*LAST[:2], "fsdp", "tensor")),
        ("row", "kernel", KERNEL, (*LAST[:2], "tensor", "fsdp")),
        ("replicate", "kernel", KERNEL, ()),
        ("column", "kernel", KERNEL[1:], (None, "fsdp", "tensor")),  # a frozen base
        ("column", "bias", (2, 12, 3072), (*LAST[:2], "tensor")),
        ("column", "lora_b", B, (*LAST, "tensor")),
        ("row", "lora_b", (2, 1, 16, 64), ()),  # small
    ):
        tree = {"layers": {"map": {leaf: shape(*sizes)}}}
        found = specs(strategy, tree, 4, 2)
        assert found["layers"]["map"][leaf] == PartitionSpec(*expected)
        # Along an axis of one device nothing is split.
        alone = specs(strategy, tree, 4, 1)["layers"]["map"][leaf]
        assert "tensor" not in alone


def test_what_cannot_be_split_is_refused() -> None:
    tree = {"layers": {"map": {"kernel": shape(2, 3, 12, 64)}}}
    for strategy, fsdp, tensor in (("row", 1, 8), ("fsdp", 8, 1)):
        with pytest.raises(InputError, match=r"config\.runtime\.mesh .* layers/map/kernel"):
            specs(strategy, tree, fsdp, tensor)
    sizes: Any = ((9, 1, 1), (-1, -1, 1), (8, 1), (3, -1, 1))
    for mesh in sizes:
        with pytest.raises(InputError, match=r"config\.runtime\.mesh"):
            make_mesh(mesh)


def test_a_batch_is_split_over_all_axes() -> None:
    """In the devices' order; -1 is for the rest of them."""
    mesh = make_mesh((-1, 2, 2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh == host_mesh((-1, 2, 2)) == host_mesh((2, 2, 2))
    batch = shard_batch(mesh, {"x": np.arange(24).reshape(8, 3)})["x"]
    assert [shard.data.shape for shard in batch.addressable_shards] == [(1, 3)] * 8
    starts = {shard.device.id: int(shard.data[0, 0]) for shard in batch.addressable_shards}
    assert starts == {i: 3 * i for i in range(8)}
    assert replicate(mesh, np.ones(3)).sharding.is_fully_replicated

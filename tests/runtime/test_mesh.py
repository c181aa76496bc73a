"""The mesh over the devices there are: eight virtual ones in these tests."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.mesh import host_mesh, make_mesh, replicate, shard_batch

DEVICES = len(jax.devices())


def test_the_rest_goes_to_the_axis_of_minus_1() -> None:
    assert dict(make_mesh((1, 1, -1)).shape) == {"data": 1, "fsdp": 1, "tensor": DEVICES}
    assert host_mesh((-1, 2, 1)) == make_mesh((-1, 2, 1))


@pytest.mark.parametrize(
    "shape",
    [
        (DEVICES + 1, 1, 1),
        (-1, DEVICES + 1, 1),
        (-1, -1, 1),
        (0, 1, 1),
        (-1, 0, 1),
        (-2, 1, 1),
        (DEVICES, 1),
        (3, -1, 1),
        (-2, -4, 1),
    ],
)
def test_sizes_that_do_not_cover_the_devices_are_refused(shape) -> None:
    with pytest.raises(InputError, match=r"config\.runtime\.mesh is .* devices"):
        make_mesh(shape)


def test_eight_devices() -> None:
    assert DEVICES == 8
    mesh = make_mesh((-1, 2, 2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    batch = shard_batch(mesh, {"x": np.arange(24).reshape(8, 3)})["x"]
    # Over all three axes, in the devices' order.
    assert [shard.data.shape for shard in batch.addressable_shards] == [(1, 3)] * 8
    starts = {shard.device.id: int(shard.data[0, 0]) for shard in batch.addressable_shards}
    assert starts == {i: 3 * i for i in range(8)}
    assert replicate(mesh, np.ones(3)).sharding.is_fully_replicated

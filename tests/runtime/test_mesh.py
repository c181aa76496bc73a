"""The mesh over the devices there are, and over eight virtual ones in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.mesh import AXES, make_mesh, replicate, shard_batch
from tests.devices import virtual_devices

DEVICES = len(jax.devices())


def test_the_rest_goes_to_the_axis_of_minus_1() -> None:
    assert dict(make_mesh().shape) == {"data": DEVICES, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh((1, 1, -1)).shape) == {"data": 1, "fsdp": 1, "tensor": DEVICES}
    assert make_mesh((DEVICES, 1, 1)).axis_names == AXES


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
    ],
)
def test_sizes_that_do_not_cover_the_devices_are_refused(shape) -> None:
    with pytest.raises(InputError, match=r"config\.runtime\.mesh is .* devices"):
        make_mesh(shape)


def test_arrays_are_placed_without_change() -> None:
    mesh = make_mesh()
    tree = {"a": np.arange(6.0, dtype=np.float32), "b": np.ones((2, 3), np.int32)}
    placed = replicate(mesh, tree)
    assert all(leaf.sharding.is_fully_replicated for leaf in placed.values())
    batch = shard_batch(mesh, np.arange(8 * DEVICES).reshape(-1, 2))
    np.testing.assert_array_equal(batch, np.arange(8 * DEVICES).reshape(-1, 2))
    for name, value in tree.items():
        np.testing.assert_array_equal(placed[name], value)


EIGHT = """
import jax, numpy as np
from qrag_jax.errors import InputError
from qrag_jax.runtime.mesh import make_mesh, replicate, shard_batch

assert len(jax.devices()) == 8
assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
mesh = make_mesh((-1, 2, 2))
assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
batch = shard_batch(mesh, {"x": np.arange(24).reshape(8, 3)})["x"]
# Over all three axes, in the devices' order.
assert [s.data.shape for s in batch.addressable_shards] == [(1, 3)] * 8
starts = {s.device.id: int(s.data[0, 0]) for s in batch.addressable_shards}
assert starts == {i: 3 * i for i in range(8)}, starts
assert replicate(mesh, np.ones(3)).sharding.is_fully_replicated
for shape in ((3, -1, 1), (4, 4, 1), (2, 2, 1), (-2, -4, 1)):
    try:
        make_mesh(shape)
    except InputError as error:
        assert "8 devices" in str(error)
    else:
        raise AssertionError(shape)
print("as it should be")
"""


def test_eight_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EIGHT],
        cwd=Path(__file__).parents[2],
        env=virtual_devices(8),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "as it should be"

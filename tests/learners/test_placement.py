"""Weights on the mesh: as they were read, where they belong, and how much memory that took.

`test_placement FOLDER`, as a program over eight devices, prints the memory that it took, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.learners import placement
from qrag_jax.learners.state import Parts
from qrag_jax.models.files.model_folder import open_tensors, write_shards
from qrag_jax.models.files.weight_names import expected_shapes, stored_params
from qrag_jax.models.trunks.families import BERT_TABLE, BertConfig
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.runtime.mesh import ALL_SPLIT, shardings_of
from tests.devices import environment_of, mesh_of
from tests.support.small_models import read_tensors

SMALL = Transformer(BertConfig(64, 64, 4, 2, 1024, 32))
LARGE = Transformer(BertConfig(8192, 512, 12, 8, 2048, 512))  # 168 MB in float32


def write(folder: Path, module: Transformer, dtype: Any, shard: int) -> Any:
    """Random weights, the same for one module whatever the dtype; as they are read."""
    folder.mkdir()
    rng, shapes = np.random.default_rng(0), expected_shapes(BERT_TABLE, module)
    arrays = {n: rng.random(s, np.float32).astype(dtype) for n, s in shapes.items()}
    write_shards(folder, arrays, shard)
    return opened(folder, module)


def opened(folder: Path, module: Transformer) -> Any:
    return stored_params(BERT_TABLE, module, open_tensors(folder), str(folder))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_placed_is_what_was_read(tmp_path: Path, dtype: Any) -> None:
    tree = write(tmp_path / "small", SMALL, dtype, 10**5 if dtype == np.float32 else 10**9)
    host = jax.tree.map(np.asarray, tree)
    for sizes in ((1, 1), (2, 4), (1, 8)):
        mesh = mesh_of(*sizes)
        shardings = shardings_of(mesh, ALL_SPLIT, tree, tree)
        if sizes == (2, 4):  # the axis of layers is split where no other fits, or it is asked for
            shardings["layers"]["query"]["kernel"] = NamedSharding(mesh, PartitionSpec("fsdp"))
        placed = placement.place(tree, shardings)
        for leaf, array, where in zip(*map(jax.tree.leaves, (placed, host, shardings))):
            assert (leaf.sharding, leaf.dtype) == (where, np.float32)
            np.testing.assert_array_equal(leaf, array)
    parts = Parts(optax.adam(1.0), has_targets=True)
    shardings = parts.shardings(mesh, ALL_SPLIT, tree)
    both = [parts.first_state(shardings, each, 1)._replace(key=()) for each in (tree, host)]
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding == other.sharding
    jax.tree.map(np.testing.assert_array_equal, both[0].params, both[0].target_params)


def rise(action: Callable[[], Any]) -> tuple[Any, int]:
    """What the action gives, and by how many bytes the process grew at most."""

    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # forgets the maximum so far
    before = memory("VmRSS")
    result = jax.block_until_ready(action())
    return result, memory("VmHWM") - before


def measure(folder: Path) -> dict[str, Any]:
    """Memory beyond that of the arrays themselves: by `place`, and by reading all and placing."""
    small, tree = opened(folder / "small", SMALL), opened(folder / "large", LARGE)
    mesh = mesh_of(1, 8)
    shardings = shardings_of(mesh, ALL_SPLIT, tree, tree)
    # All that loading takes but weights.
    placement.place(small, shardings_of(mesh, ALL_SPLIT, small, small))
    placed, ours = rise(lambda: placement.place(tree, shardings))
    parts = [part for leaf in jax.tree.leaves(placed) for part in leaf.addressable_shards]
    on_device = dict.fromkeys(jax.devices(), 0)
    for part in parts:
        on_device[part.device] += part.data.nbytes
    del placed, parts, part

    def read_all() -> Any:
        tensors = read_tensors(folder / "large")
        return jax.device_put(
            jax.tree.map(np.asarray, stored_params(BERT_TABLE, LARGE, tensors, "all")), shardings
        )

    held = sum(on_device.values())
    return {
        "held": held,
        "most_on_a_device": max(on_device.values()),
        "whole": sum(4 * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree)),
        "ours": ours - held,
        "reading_all": rise(read_all)[1] - held,
        "tensor": max(leaf.tensor_bytes for leaf in jax.tree.leaves(tree)),
        "shard": max(path.stat().st_size for path in (folder / "large").glob("*.safetensors")),
    }


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the memory")
def test_memory_on_the_way_is_that_of_a_tensor(tmp_path: Path) -> None:
    """Virtual devices keep their arrays in the process: what it grew by at most, less the arrays
    that are there in the end, is what the host held on the way, mapped pages of files included."""
    # Not written by the program itself, whose freed memory would be used again.
    write(tmp_path / "small", SMALL, np.float32, 10**5)
    write(tmp_path / "large", LARGE, np.float32, 40_000_000)
    command = [sys.executable, "-m", "tests.learners.test_placement", str(tmp_path)]
    root, environment = Path(__file__).parents[2], environment_of(8)
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    memory = json.loads(result.stdout.splitlines()[-1])
    assert memory["whole"] > 4 * memory["shard"]
    allowed = 1.3 * memory["shard"] + memory["tensor"]
    # Reading all tensors and stacking them does not pass, so this measures what it says.
    assert memory["reading_all"] > 2 * allowed
    assert memory["ours"] < allowed
    assert memory["ours"] < 2 * memory["tensor"] + 5e6
    # All of the model is there once, but for small leaves.
    assert memory["held"] < 1.02 * memory["whole"]
    assert memory["most_on_a_device"] < 1.02 * memory["whole"] / 8


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))

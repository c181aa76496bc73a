"""Weights put from their files onto a mesh of eight devices.

`placed_weights FOLDER`, as a program over eight devices, prints the memory that it took, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.learners import placement
from qrag_jax.models.files.model_folder import open_tensors, read_tensors
from qrag_jax.models.files.shards import Size, write_shards
from qrag_jax.models.files.weight_names import expected_shapes, params_from_tensors, stored_params
from qrag_jax.models.trunks.bert import Bert, BertConfig
from qrag_jax.models.trunks.bert_weights import TABLE
from qrag_jax.runtime.mesh import AXES
from qrag_jax.runtime.sharding import shardings_of
from tests.learners.three_steps import OPTIMIZER

RULES = ((".*", "fsdp"),)
SMALL = Bert(BertConfig(64, 64, 4, 2, 1024, 32))
LARGE = Bert(BertConfig(8192, 512, 12, 8, 2048, 512))  # 168 MB in float32
SHARD = 40_000_000


def write(folder: Path, module: Bert, dtype: Any, shard: int) -> None:
    """Random weights, the same for one module whatever the dtype."""
    folder.mkdir()
    sizes = {n: Size(s, np.dtype(dtype)) for n, s in expected_shapes(TABLE, module).items()}
    rng = np.random.default_rng(0)
    arrays = ((n, rng.random(s.shape, np.float32).astype(dtype)) for n, s in sizes.items())
    write_shards(folder, sizes, arrays, shard)


def stored(folder: Path, module: Bert) -> Any:
    return stored_params(TABLE, module, open_tensors(folder), str(folder))


def mesh_of(data: int, fsdp: int) -> Mesh:
    devices = np.array(jax.devices()[: data * fsdp])
    return Mesh(devices.reshape(data, fsdp, 1), AXES)


def one_tower(mesh: Mesh, tree: Any) -> Any:
    return shardings_of(mesh, RULES, tree, tree)


def status(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def rise(action: Callable[[], Any]) -> tuple[Any, int]:
    """What the action gives, and by how many bytes the process grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the maximum so far
    before = status("VmRSS")
    result = jax.block_until_ready(action())
    return result, status("VmHWM") - before


def measure(folder: Path) -> dict[str, Any]:
    """Memory beyond that of the arrays themselves: by `place`, and by reading all and placing."""
    tree = stored(folder / "large", LARGE)
    shardings = one_tower(mesh_of(1, 8), tree)
    small = stored(folder / "small", SMALL)
    placement.place(small, one_tower(mesh_of(1, 8), small))  # all that loading takes but weights

    placed, ours = rise(lambda: placement.place(tree, shardings))
    arrays = jax.tree.leaves(placed)
    held = [s.data.nbytes for leaf in arrays for s in leaf.addressable_shards]
    most = max(
        sum(s.data.nbytes for leaf in arrays for s in leaf.addressable_shards if s.device == device)
        for device in jax.devices()
    )
    del placed, arrays

    def read_all() -> Any:
        tensors = read_tensors(folder / "large")
        return jax.device_put(params_from_tensors(TABLE, LARGE, tensors, "all"), shardings)

    everything, theirs = rise(read_all)
    del everything
    return {
        "held": sum(held),
        "most_on_a_device": most,
        "whole": sum(4 * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree)),
        "ours": ours - sum(held),
        "reading_all": theirs - sum(held),
        "tensor": max(leaf.tensor_bytes for leaf in jax.tree.leaves(tree)),
        "shard": max(path.stat().st_size for path in (folder / "large").glob("*.safetensors")),
    }


def values(folder: Path) -> list[str]:
    """Placed leaves of the small model that are not as read or not where they should be."""
    wrong = []
    for name in ("small", "half"):
        tree = stored(folder / name, SMALL)
        host = jax.tree.map(np.asarray, tree)
        for mesh in (mesh_of(1, 1), mesh_of(8, 1), mesh_of(2, 4), mesh_of(1, 8)):
            shardings = one_tower(mesh, tree)
            # The axis of layers is split where no other fits; here it is asked for.
            query = shardings["layers"]["query"]
            if mesh.shape["fsdp"] == 4:
                query["kernel"] = NamedSharding(mesh, PartitionSpec("fsdp"))
            placed = placement.place(tree, shardings)
            same = jax.tree.map(
                lambda leaf, array, where: (
                    leaf.sharding == where
                    and leaf.dtype == np.float32
                    and np.array_equal(np.asarray(leaf), array)
                ),
                placed,
                host,
                shardings,
            )
            paths = jax.tree_util.tree_leaves_with_path(same)
            wrong += [f"{name} {mesh.shape} {path}" for path, fine in paths if not fine]
    shardings = placement.state_shardings(mesh, RULES, tree, OPTIMIZER)
    states = [placement.first_state(shardings, t, OPTIMIZER, 1) for t in (tree, host)]
    leaves = [jax.tree.leaves(state._replace(key=())) for state in states]
    for one, other in zip(*leaves, strict=True):
        if not (np.array_equal(one, other) and one.sharding == other.sharding):
            wrong.append(f"first_state {one.shape}")
    return wrong


def main() -> None:
    folder = Path(sys.argv[1])
    assert len(jax.devices()) == 8
    write(folder / "small", SMALL, np.float32, 10**5)
    write(folder / "large", LARGE, np.float32, SHARD)
    print(json.dumps(measure(folder)))


if __name__ == "__main__":
    main()

"""Sharding rules: which parameter is split where, what follows it, and which rules are refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.runtime.config_fields import fill
from qrag_jax.runtime.mesh import (
    AXES,
    RuntimeConfig,
    host_mesh,
    make_mesh,
    replicate,
    shard_batch,
    shardings_of,
)

ALL = ((".*", "fsdp"),)
WHOLE = PartitionSpec()


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.float32)


PARAMS = {
    "word_embeddings": shape(2, 30522, 768),
    "norm": {"scale": shape(2, 768)},
    "layers": {
        "query": {"kernel": shape(2, 12, 768, 768), "bias": shape(2, 12, 768)},
        "output": {"kernel": shape(2, 12, 3072, 768)},
        "norm": {"scale": shape(2, 12, 768)},
    },
}


def specs(
    rules: Any, tree: Any = PARAMS, params: Any = PARAMS, fsdp: int = 8, tensor: int = 1
) -> Any:
    found = shardings_of(AbstractMesh((2, fsdp, tensor), AXES), rules, tree, params)
    return jax.tree.map(lambda each: each.spec, found)


def test_large_arrays_are_split() -> None:
    assert specs(ALL) == {
        "word_embeddings": PartitionSpec(None, None, "fsdp"),
        "norm": {"scale": WHOLE},
        "layers": {
            "query": {"kernel": PartitionSpec(None, None, "fsdp"), "bias": WHOLE},
            "output": {"kernel": PartitionSpec(None, None, "fsdp")},
            "norm": {"scale": WHOLE},
        },
    }


TENSOR_LAST = PartitionSpec(None, None, None, "tensor")
KERNEL, A, B = (2, 12, 768, 3072), (2, 12, 768, 16), (2, 12, 16, 3072)


@pytest.mark.parametrize(
    ("strategy", "leaf", "sizes", "expected"),
    [
        ("column", "kernel", KERNEL, PartitionSpec(None, None, "fsdp", "tensor")),
        ("row", "kernel", KERNEL, PartitionSpec(None, None, "tensor", "fsdp")),
        ("fsdp", "kernel", KERNEL, PartitionSpec(None, None, "fsdp")),
        ("replicate", "kernel", KERNEL, WHOLE),
        ("column", "kernel", (2, 1, 8, 8), PartitionSpec(None, None, "fsdp", "tensor")),  # small
        ("column", "kernel", KERNEL[1:], PartitionSpec(None, "fsdp", "tensor")),  # a frozen base
        ("column", "bias", (2, 12, 3072), PartitionSpec(None, None, "tensor")),
        ("row", "bias", (2, 12, 3072), WHOLE),
        ("column", "lora_a", A, PartitionSpec(None, None, "fsdp")),
        ("column", "lora_b", B, TENSOR_LAST),
        ("row", "lora_a", A, PartitionSpec(None, None, "tensor")),
        ("row", "lora_b", B, PartitionSpec(None, None, None, "fsdp")),
        ("row", "lora_b", (2, 1, 16, 64), WHOLE),  # small
        ("fsdp", "lora_b", B, PartitionSpec(None, None, None, "fsdp")),
    ],
)
def test_which_dimensions_of_a_map(
    strategy: str, leaf: str, sizes: tuple[int, ...], expected: PartitionSpec
) -> None:
    tree = {"layers": {"map": {leaf: shape(*sizes)}}}
    tensor = 2 if strategy in ("column", "row") else 1
    found = specs(((".*", strategy),), tree, tree, 4, tensor)
    assert found["layers"]["map"][leaf] == expected
    # Along an axis of one device nothing is split.
    alone = specs(((".*", strategy),), tree, tree, 4, 1)["layers"]["map"][leaf]
    assert "tensor" not in alone


@pytest.mark.parametrize("sizes", [(2, 3, 12, 64), (2, 3, 64, 12)])
def test_a_map_that_does_not_divide_is_refused(sizes: tuple[int, ...]) -> None:
    tree = {"layers": {"map": {"kernel": shape(*sizes)}}}
    strategy = "fsdp" if sizes[-1] == 64 else "row"
    with pytest.raises(InputError, match="8 devices along fsdp, which do not divide 12"):
        specs(((".*", strategy),), tree, tree, 8, 1)


def test_the_first_rule_found_in_the_name_holds() -> None:
    split = PartitionSpec(None, None, "fsdp")
    found = specs((("^layers/.*/kernel$", "fsdp"), ("layers", "replicate"), *ALL))
    assert found["layers"]["query"]["kernel"] == found["word_embeddings"] == split
    found = specs((("layers", "replicate"), ("kernel", "fsdp"), *ALL))
    assert found["layers"]["query"]["kernel"] == WHOLE
    assert found["word_embeddings"] == split
    # Without a rule for it an array is replicated.
    found = specs((("query", "fsdp"),))
    assert found["layers"]["query"]["kernel"] == split
    assert found["word_embeddings"] == WHOLE
    assert set(jax.tree.leaves(specs(()))) == {WHOLE}


def test_targets_and_moments_follow_their_parameter() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {
        "params": PARAMS,
        "target_params": PARAMS,
        "opt_state": jax.eval_shape(optimizer.init, PARAMS),
        "step": shape(),
    }
    # Rules that tell the two arrays that end alike apart.
    rules = (("^norm", "fsdp"), ("^layers/norm", "replicate"), *ALL)
    params = PARAMS | {"norm": {"scale": shape(2, 65536)}}
    state["params"] = params
    state["opt_state"] = jax.eval_shape(optimizer.init, params)
    found = specs(rules, state, params)
    own = specs(rules, params, params)
    assert own["norm"]["scale"] == PartitionSpec(None, "fsdp")
    assert found["params"] == own
    adam = found["opt_state"][1][0]
    assert adam.mu == adam.nu == own
    assert adam.count == found["step"] == WHOLE
    # An array of the same name and another shape stands for something else.
    assert found["target_params"]["norm"]["scale"] == WHOLE


def test_malformed_rules() -> None:
    of_three, of_numbers = ((".*", "fsdp", 1),), ((1, "fsdp"),)
    refused: Any = (((".*", "zero3"),), (("(", "fsdp"),), ("fsdp",), of_three, of_numbers)
    for rules in refused:
        with pytest.raises(InputError, match=r"config\.runtime\.sharding"):
            fill(RuntimeConfig, {"sharding": rules}, "runtime")


# ---------------------------------------------------------------------- the mesh


DEVICES = len(jax.devices())


def test_the_rest_goes_to_the_axis_of_minus_1() -> None:
    assert dict(make_mesh((1, 1, -1)).shape) == {"data": 1, "fsdp": 1, "tensor": DEVICES}
    assert host_mesh((-1, 2, 1)) == make_mesh((-1, 2, 1))


def test_sizes_that_do_not_cover_the_devices_are_refused() -> None:
    too_many = (DEVICES + 1, 1, 1), (-1, DEVICES + 1, 1)
    two_rests = (-1, -1, 1), (-2, -4, 1)
    others: tuple[Any, ...] = ((0, 1, 1), (-1, 0, 1), (-2, 1, 1), (DEVICES, 1), (3, -1, 1))
    for shape in (*too_many, *two_rests, *others):
        with pytest.raises(InputError, match=r"config\.runtime\.mesh is .* 8 devices"):
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

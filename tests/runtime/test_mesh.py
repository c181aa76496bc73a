"""Sharding rules: which parameter is split where, and what follows it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.runtime.mesh import AXES, host_mesh, make_mesh, replicate, shard_batch, shardings_of

ALL = ((".*", "fsdp"),)
WHOLE = PartitionSpec()
SPLIT = PartitionSpec(None, None, "fsdp")


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.float32)


PARAMS = {
    "word_embeddings": shape(2, 30522, 768),
    "norm": {"scale": shape(2, 768)},
    "layers": {
        "query": {"kernel": shape(2, 12, 768, 768), "bias": shape(2, 12, 768)},
        "norm": {"scale": shape(2, 12, 768)},
    },
}


def specs(
    rules: Any, tree: Any = PARAMS, params: Any = PARAMS, fsdp: int = 8, tensor: int = 1
) -> Any:
    found = shardings_of(AbstractMesh((2, fsdp, tensor), AXES), rules, tree, params)
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
        found = specs(((".*", strategy),), tree, tree, 4, 2)
        assert found["layers"]["map"][leaf] == PartitionSpec(*expected)
        # Along an axis of one device nothing is split.
        alone = specs(((".*", strategy),), tree, tree, 4, 1)["layers"]["map"][leaf]
        assert "tensor" not in alone


def test_the_first_rule_found_in_the_name_holds() -> None:
    """Small arrays stay whole, and those without a rule."""
    query = {"kernel": SPLIT, "bias": WHOLE}
    small = {"norm": {"scale": WHOLE}}
    everything = {**small, "word_embeddings": SPLIT, "layers": {"query": query, **small}}
    assert specs((("^layers/.*/kernel$", "fsdp"), ("layers", "replicate"), *ALL)) == everything
    replicated = {**everything, "layers": {"query": {"kernel": WHOLE, "bias": WHOLE}, **small}}
    assert specs((("layers", "replicate"), ("kernel", "fsdp"), *ALL)) == replicated
    assert specs((("query", "fsdp"),)) == {**everything, "word_embeddings": WHOLE}


def test_targets_and_moments_follow_their_parameter() -> None:
    # Rules that tell the two arrays that end alike apart.
    rules = (("^norm", "fsdp"), ("^layers/norm", "replicate"), *ALL)
    params = PARAMS | {"norm": {"scale": shape(2, 65536)}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    moments = jax.eval_shape(optimizer.init, params)
    state = {"params": params, "target_params": PARAMS, "opt_state": moments, "step": shape()}
    found, expected = specs(rules, state, params), specs(rules, params, params)
    assert expected["norm"]["scale"] == PartitionSpec(None, "fsdp")
    adam = found["opt_state"][1][0]
    assert found["params"] == adam.mu == adam.nu == expected
    assert adam.count == found["step"] == WHOLE
    # An array of the same name and another shape stands for something else.
    assert found["target_params"]["norm"]["scale"] == WHOLE


def test_what_cannot_be_split_is_refused() -> None:
    tree = {"layers": {"map": {"kernel": shape(2, 3, 12, 64)}}}
    for strategy, fsdp, tensor in (("row", 1, 8), ("fsdp", 8, 1)):
        with pytest.raises(InputError, match=r"config\.runtime\.mesh .* layers/map/kernel"):
            specs(((".*", strategy),), tree, tree, fsdp, tensor)
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

"""Sharding rules: which parameter is split where, what follows it, and which rules are refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.runtime.mesh import AXES
from qrag_jax.runtime.sharding import check_rules, shardings_of, specs_of

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
    return specs_of(shardings_of(AbstractMesh((2, fsdp, tensor), AXES), rules, tree, params))


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


def test_a_map_that_is_computed_in_parts_is_stored_so() -> None:
    with pytest.raises(InputError, match="layers/output/kernel is stored by the strategy 'fsdp'"):
        specs(ALL, tensor=2)


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


@pytest.mark.parametrize(
    "rules",
    [
        ((".*", "zero3"),),
        (("(", "fsdp"),),
        ("fsdp",),
        ((".*", "fsdp", 1),),
        ((1, "fsdp"),),
        None,
    ],
)
def test_malformed_rules(rules: Any) -> None:
    with pytest.raises(InputError, match=r"config\.runtime\.sharding"):
        check_rules(rules)

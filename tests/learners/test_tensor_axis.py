"""Each family under its own partition rules on all three axes: the numbers of one device."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.sharding import LEAST_SPLIT
from tests.devices import mesh_of
from tests.learners.sharded_steps import (
    FAMILIES,
    SLOW_TENSOR_CASES,
    TENSOR_CASES,
    Case,
    forget,
    found,
    may_be_sent,
)
from tests.learners.test_sharded_steps import check_equal, check_moments, each
from tests.support import hlo

pytestmark = pytest.mark.long

every_case = each(TENSOR_CASES, SLOW_TENSOR_CASES)


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten() -> Iterator[None]:
    yield
    forget()


@every_case
def test_ten_steps_are_those_of_one_device(case: Case) -> None:
    whole = found(Case(1, 1, 1, family=case.family)).arrays
    assert len(set(whole["losses"].tolist())) == 10
    check_equal(found(case).arrays, whole)
    check_moments(found(case).arrays, whole)


@every_case
def test_a_device_holds_its_part_alone(case: Case) -> None:
    split = 0
    for name, (total, own) in found(case).held.items():
        *_, owner, leaf = name.split("/") if "/" in name else ("", name)
        parts, maps = 1, FAMILIES[case.family][0].module.SPLIT
        if leaf == "kernel":
            parts = case.fsdp * case.tensor
            split += 1
        elif leaf == "bias" and owner in maps.columns:
            parts = case.tensor
        elif total >= 4 * LEAST_SPLIT:
            parts = case.fsdp
        assert own == total // parts, name
    assert split >= 4 * 6  # of online and target towers and two moments


@every_case
def test_nothing_else_is_sent(case: Case) -> None:
    assert hlo.unexpected(found(case).program, may_be_sent(case)) == []


def test_every_kernel_of_a_layer_opens_or_closes_a_part() -> None:
    """Of the models that can be computed in parts; all else is split over `fsdp` alone."""
    for family, (encoder, rules) in FAMILIES.items():
        tree = jax.eval_shape(encoder.init, jax.random.key(0))
        maps = encoder.module.SPLIT
        assert set(tree["layers"]) >= {*maps.columns, *maps.rows, *maps.norms}
        for path, _ in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            rule = next(strategy for pattern, strategy in rules if re.search(pattern, name))
            wanted = {"fsdp"}
            if name.endswith("kernel") and family != "new":
                wanted = {"column", "row"}
            elif name.startswith("layers/"):
                wanted |= {"column", "row"}
            assert rule in wanted, (family, name)


def refusal(family: str, tensor: int) -> str:
    with pytest.raises(InputError) as caught:
        FAMILIES[family][0].on(mesh_of(tensor=tensor))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tensor_axis_that_does_not_fit_is_refused() -> None:
    assert refusal("bert", 4) == (
        "config.runtime.mesh has a tensor axis of 4, which does not divide 2, the model's "
        "num_attention_heads; use a divisor of it, and the fsdp axis for the other devices."
    )
    assert "does not divide 4, the model's num_key_value_heads" in refusal("qwen3", 8)
    assert "queries, keys and values are one map in its files; use the fsdp" in refusal("new", 2)

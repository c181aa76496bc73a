"""Each family under its own partition rules on all three axes: the numbers of one device."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.runtime.sharding import LEAST_SPLIT
from tests.learners import hlo
from tests.learners.sharded_steps import FAMILIES, SLOW_TENSOR_CASES, TENSOR_CASES, Case
from tests.learners.test_sharded_steps import arrays, check_equal, each, finish, moments, start

every_case = each(TENSOR_CASES, SLOW_TENSOR_CASES)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    finish(start(8, str(folder), "tensor"))
    return folder


@pytest.fixture(scope="module")
def slow_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor_slow")
    finish(start(8, str(folder), "tensor", "slow"))
    return folder


@pytest.fixture
def found_in(case: Case, request: pytest.FixtureRequest) -> Path:
    """The folder with what was found of the case."""
    return request.getfixturevalue("slow_out" if case in SLOW_TENSOR_CASES else "out")


@every_case
def test_ten_steps_are_those_of_one_device(out: Path, found_in: Path, case: Case) -> None:
    whole = arrays(out / f"{Case(1, 1, 1, family=case.family).name}.npz")
    assert len(set(whole["losses"].tolist())) == 10
    found = arrays(found_in / f"{case.name}.npz")
    check_equal(found, whole)
    for moment, atol in (("mu", 1e-6), ("nu", 1e-9)):
        for ours, theirs in zip(moments(found, moment), moments(whole, moment), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=atol)


@every_case
def test_a_device_holds_its_part_alone(found_in: Path, case: Case) -> None:
    held = json.loads((found_in / f"{case.name}.json").read_text())["bytes"]
    split = 0
    for name, (total, own) in held.items():
        large = total >= 4 * LEAST_SPLIT
        both = large and (name.endswith("kernel") or "word_embeddings" in name)
        parts = case.fsdp * case.tensor if both else case.fsdp if large else 1
        assert own == total // parts, name
        split += both
    assert split >= 4 * 5  # of online and target towers and two moments


@every_case
def test_only_parameters_and_sums_are_sent(found_in: Path, case: Case) -> None:
    found = json.loads((found_in / f"{case.name}.json").read_text())
    shapes: set[tuple[int, ...]] = set()
    for whole, part in zip(found["shapes"], found["parts"], strict=True):
        # Gathered over one axis after the other.
        shapes |= set(itertools.product(*map(set, zip(whole, part, strict=True))))
    assert hlo.unexpected((found_in / f"{case.name}.hlo").read_text(), shapes, split=True) == []


def test_rules_name_every_kernel() -> None:
    """`.*` is for the rest: tables, biases and norms."""
    for family, (encoder, rules) in FAMILIES.items():
        tree = jax.eval_shape(encoder.init, jax.random.key(0))
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        ]
        for name in names:
            rule = next(strategy for pattern, strategy in rules if re.search(pattern, name))
            wanted = {"kernel": {"column", "row"}, "word_embeddings": {"row"}}
            assert rule in wanted.get(name.split("/")[-1], {"fsdp"}), (family, name)

"""Each family under its own partition rules on all three axes: the numbers of one device."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import jax
import pytest

from benchmarks import hlo
from qrag_jax.runtime.sharding import LEAST_SPLIT
from tests.learners.sharded_steps import (
    FAMILIES,
    SLOW_TENSOR_CASES,
    TENSOR_CASES,
    Case,
    forget,
    found,
)
from tests.learners.test_sharded_steps import check_equal, check_moments, each

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
        large = total >= 4 * LEAST_SPLIT
        both = large and (name.endswith("kernel") or "word_embeddings" in name)
        parts = case.fsdp * case.tensor if both else case.fsdp if large else 1
        assert own == total // parts, name
        split += both
    assert split >= 4 * 5  # of online and target towers and two moments


@every_case
def test_only_parameters_and_sums_are_sent(case: Case) -> None:
    shapes: set[tuple[int, ...]] = set()
    for whole, part in found(case).shapes.values():
        # Gathered over one axis after the other.
        shapes |= set(itertools.product(*map(set, zip(whole, part, strict=True))))
    assert hlo.unexpected(found(case).program, shapes, split=True) == []


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

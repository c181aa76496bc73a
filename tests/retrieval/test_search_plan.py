"""Blocks cover a part, and hardly more."""

import pytest

from qrag_jax.retrieval.device_vectors import Layout
from qrag_jax.retrieval.search_plan import (
    GROUP,
    Wanted,
    padded_batch,
    plan_of,
    working_bytes,
)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("count", [1, 15, 100, 2049, 10**6, 21_015_324])
@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_blocks_cover_a_part(count: int, batch: int, on_cpu: bool) -> None:
    rows = -(-count // GROUP) * GROUP
    plan = plan_of(Layout(count, 1024, rows, "bfloat16"), Wanted(batch, 100, 200), on_cpu)
    assert plan.block % GROUP == 0
    assert plan.block <= rows
    assert plan.groups <= rows // GROUP
    blocks = -(-rows // plan.block)
    in_spans = -(-blocks // plan.span) * plan.span
    assert in_spans * plan.block <= 1.05 * rows + in_spans * 128
    if not on_cpu:
        assert blocks <= 160  # all are written out
        assert batch * plan.block <= max(2**28 + batch * 128, batch * rows // 100)


def test_batches() -> None:
    assert [padded_batch(n) for n in (1, 2, 8, 9, 64, 65, 1000)] == [1, 8, 8, 16, 64, 128, 1024]


def test_memory_of_a_search_is_small_beside_the_vectors() -> None:
    layout = Layout(21_015_324, 1024, 21_015_328, "bfloat16")
    assert layout.bytes == 21_015_328 * 2049
    assert working_bytes(layout, False) < 5 * 2**30

"""The memory suite's bytes: those of the parts that each device holds, from programs never run."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from benchmarks import memory_cases
from benchmarks.memory import GIB, fits, total
from benchmarks.memory_cases import Model, Step, mesh_of, part_bytes
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.trunks.bert import BertConfig
from qrag_jax.models.trunks.qwen3 import Qwen3Config

TINY = (
    Model("tiny BERT", "bert", BertConfig(512, 128, 2, 2, 256)),
    Model("tiny Qwen3", "qwen3", Qwen3Config(512, 128, 2, 4, 2, 256, head_dim=32)),
)
# One block each, where a training has several: the step compiles in a quarter of the time.
SHAPES = BlockShapes(
    Blocks((512,), (16,), (16.0,)), Blocks((512,), (32,), (32.0,)), Blocks((512,), (32,), (32.0,))
)
SMALL = {
    "QUESTIONS": 1,
    "block_shapes_for": lambda encoder: SHAPES,
    "CHUNKS": 3,
    "ROW_TOKENS": 16,
    "QUESTION_TOKENS": 8,
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Steps of tiny encoders on meshes of eight devices, and what their bytes should be."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(memory_cases, name, value)
        for model, lora, shape in (
            (TINY[0], False, (1, 1, 1)),
            (TINY[0], False, (2, 2, 2)),
            (TINY[1], True, (1, 4, 2)),
        ):
            row = memory_cases.measure(model, shape, lora)
            state, batch, *base = Step(model, mesh_of(shape), lora).arguments
            # No step reads which samples of which epoch its questions are: the compiler drops them.
            leaves = jax.tree.leaves((state, batch._replace(sample=(), epoch=()), base))
            expected = sum(part_bytes(leaf) for leaf in leaves)
            whole = sum(memory_cases.whole_bytes(leaf) for leaf in leaves)
            found.append(row | {"expected": expected, "whole": whole})
    return found


def test_arguments_are_the_shards_of_a_device(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["arguments"] == row["expected"], row
    one, eight, lora = rows
    assert one["expected"] == one["whole"]
    assert eight["expected"] < 0.5 * eight["whole"]
    assert lora["expected"] < 0.8 * lora["whole"]  # of a tiny base little is large enough to split


def test_the_state_is_donated(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert 0 <= row["outputs"] < 4096  # metrics


def test_no_device_holds_a_whole_model(rows: list[dict[str, Any]]) -> None:
    one, eight, _ = rows
    # Rows of a block take the same everywhere, but no device gathers the towers and their targets.
    assert eight["temporaries"] < one["temporaries"] + 0.25 * one["whole"]


def test_what_fits() -> None:
    row = {"arguments": 20 * GIB, "outputs": GIB, "temporaries": GIB}
    assert total(row) == 22 * GIB
    assert fits(row) == "24 GiB"
    assert fits(row | {"temporaries": 2 * GIB}) == "40 GiB"  # room is left for the runtime
    assert fits(row | {"temporaries": 200 * GIB}) == "none"

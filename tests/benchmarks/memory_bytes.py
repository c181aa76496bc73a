"""Compiled steps of tiny encoders on meshes of eight devices; prints what their bytes should be."""

from __future__ import annotations

import json

import jax

from benchmarks import memory_cases
from benchmarks.memory_cases import Model, Step, mesh_of, part_bytes
from qrag_jax.models.trunks.bert import BertConfig
from qrag_jax.models.trunks.qwen3 import Qwen3Config

TINY = (
    Model("tiny BERT", "bert", BertConfig(512, 128, 2, 2, 256)),
    Model("tiny Qwen3", "qwen3", Qwen3Config(512, 128, 2, 4, 2, 256, head_dim=32)),
)


def main() -> None:
    memory_cases.QUESTIONS, memory_cases.BLOCK_TOKENS = 1, 512
    memory_cases.CHUNKS, memory_cases.ROW_TOKENS, memory_cases.QUESTION_TOKENS = 3, 16, 8
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
        print(json.dumps(row | {"expected": expected, "whole": whole}), flush=True)


if __name__ == "__main__":
    main()

"""The rows of the suite gpu: which programs of which encoders are compiled, for which devices.

A row's name tells all of it, such as h100/Qwen3-Embedding-4B/lora/1x8x1/update.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.gpu_programs import NAMES, UPDATE
from benchmarks.gpu_query import ALGORITHMS
from benchmarks.gpu_search import SEARCH, TINY_CORPUS, WIKIPEDIA, CorpusSize
from benchmarks.gpu_tokens import (
    LANGUAGE_MODELS,
    PROGRAMS,
    TINY_LANGUAGE_MODEL,
    LanguageModelSize,
)
from benchmarks.memory_cases import BERT_BASE, E5_LARGE, FURTHER, MINILM, QWEN3, TINY, Model
from qrag_jax.errors import InputError
from qrag_jax.runtime.targets import TARGETS

GPU, TPUS = "h100", ("v5e", "v6e")
# Sizes along data, fsdp and tensor.
ONE, EIGHT, SIXTY_FOUR = (1, 1, 1), (1, 8, 1), (4, 8, 2)
# Two towers, their targets and moments, in float32, are more than one device holds.
NOT_ON_ONE = QWEN3[1:]
# The query encoders of HARR, and whether adapters of them are trained.
OF_QUERIES = ((BERT_BASE, False), (QWEN3[0], True), (QWEN3[0], False), (QWEN3[1], True))


class Row(NamedTuple):
    """One program of one encoder on one mesh.

    Attributes:
        target: a kind of device, of `runtime.targets`.
        mesh: sizes along data, fsdp and tensor.
        lora: adapters are trained, else whole towers.
        model: an encoder or a language model; of a search, a corpus.
        program: one of `gpu_programs.NAMES` or `gpu_tokens.PROGRAMS`, a key of
            `gpu_query.ALGORITHMS`, or a search.
    """

    target: str
    model: Model | CorpusSize | LanguageModelSize
    lora: bool
    mesh: tuple[int, int, int]
    program: str

    @property
    def name(self) -> str:
        """The row in one word without spaces."""
        model, sizes = self.model.name.replace(" ", "-"), "x".join(map(str, self.mesh))
        trained = "lora" if self.lora else "full"
        return f"{self.target}/{model}/{trained}/{sizes}/{self.program}"

    @property
    def devices(self) -> str:
        """The devices as `runtime.targets.described_devices` names them."""
        return f"{self.target}x{math.prod(self.mesh)}"

    @property
    def platform(self) -> str:
        """Either "cuda" or "tpu"."""
        return TARGETS[self.target].platform


def rows(quick: bool) -> list[Row]:
    """All rows: the quick ones, which take a minute or two, or the others, which take hours."""
    if quick:
        tiny = [Row(GPU, TINY, True, EIGHT, program) for program in (*NAMES, *ALGORITHMS)]
        search = Row(GPU, TINY_CORPUS, False, EIGHT, SEARCH)
        tokens = [Row(GPU, TINY_LANGUAGE_MODEL, True, EIGHT, program) for program in PROGRAMS]
        return [*tiny, Row(GPU, MINILM, False, EIGHT, UPDATE), search, *tokens]
    found = [
        Row(GPU, model, lora, mesh, program)
        for mesh in (ONE, EIGHT, SIXTY_FOUR)
        for model in (BERT_BASE, E5_LARGE, *QWEN3)
        for lora in (False, True)
        for program in NAMES
        if lora or mesh != ONE or model not in NOT_ON_ONE
    ]
    found += [Row(GPU, model, False, mesh, UPDATE) for mesh in (ONE, EIGHT) for model in FURTHER]
    found += [
        Row(GPU, model, lora, mesh, program)
        for mesh in (ONE, EIGHT)
        for model, lora in OF_QUERIES
        for program in ALGORITHMS
    ]
    found += [Row(GPU, WIKIPEDIA, False, mesh, SEARCH) for mesh in (ONE, EIGHT)]
    found += [
        Row(GPU, model, lora, mesh, program)
        for mesh in (ONE, EIGHT)
        for model in LANGUAGE_MODELS
        for lora in (False, True)
        for program in PROGRAMS
        if lora or mesh != ONE
    ]
    return found + [Row(target, BERT_BASE, False, EIGHT, UPDATE) for target in TPUS]


def chosen(every: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows in whose names one of the regular expressions is found; without any, all rows.

    Raises:
        InputError: a pattern is no regular expression, or no row has it.
    """
    if not patterns:
        return list(every)
    kept: set[Row] = set()
    for pattern in patterns:
        try:
            found = [row for row in every if re.search(pattern, row.name)]
        except re.error as error:
            raise InputError(
                f"--only is {pattern!r}, which is no regular expression ({error}); write one that "
                "is found in the names of rows."
            ) from None
        if not found:
            raise InputError(
                f"--only is {pattern!r}, which no row has; their names are such as "
                f"{every[0].name} and {every[-1].name}."
            )
        kept.update(found)
    return [row for row in every if row in kept]

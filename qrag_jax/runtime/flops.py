"""FLOPs of a compiled program's matrix products, from its HLO text, and the peaks of devices.

FLOPs come from shapes, so padding and what is computed twice count. Loops with a count are
multiplied; of loops over blocks of rows (`models.compute.ragged`) the caller says how many rounds
there are and which branch they take. XLA's own cost analysis takes every loop as one round.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from qrag_jax.runtime.hlo import Instruction, Module, arrays, elements

TF32 = "tf32"
_GEMM = re.compile(r'custom_call_target="__cu(?:blas|dnn)\$[^"]*(?:gemm|matmul)', re.IGNORECASE)
_SCORES = re.compile(r'"intermediate_tensor_shape".*?"dimensions": ?\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type": ?"(?:PADDING_)?CAUSAL"')

# FLOP/s of products by the type of their factors: NVIDIA's data sheets of the H100 and H200 (SXM)
# and the A100 (80 GB, SXM), without sparsity.
_HOPPER = {"bf16": 989e12, "f16": 989e12, TF32: 495e12, "f32": 67e12}
_AMPERE = {"bf16": 312e12, "f16": 312e12, TF32: 156e12, "f32": 19.5e12}
PEAKS = {"h100": _HOPPER, "h200": _HOPPER, "a100": _AMPERE}
# What an H200 reached on 2026-11-27: 0.26 in HARR's updates, 0.27 in Q-RAG's, 0.38 in RLVR's.
# Times and prices take the lowest.
SHARE_OF_PEAK = 0.26


class Rounds(NamedTuple):
    """The course of a loop over blocks."""

    rounds: float = 1.0  # mean number
    shares: tuple[float, ...] = ()  # of the rounds, that take each branch; (): all alike


Loops = Mapping[tuple[int, int], Rounds]  # by the rows `[N, L]` that a loop carries


def least_seconds(device_kind: str, flops: Mapping[str, float]) -> float | None:
    """Seconds of so many FLOPs, by type, at the peak of a device; None: its peak is unknown.

    Args:
        device_kind: JAX's name of it, such as "NVIDIA H100 80GB HBM3". The slower cards of the
            same names, for PCIe, are unknown.
        flops: as `product_flops` counts them.
    """
    words = device_kind.lower().replace("-", " ").split()
    peaks = next((PEAKS[word] for word in words if word in PEAKS), None)
    if peaks is None or {"pcie", "nvl"} & set(words):
        return None
    return sum(count / peaks.get(dtype, peaks["f32"]) for dtype, count in flops.items())


def product_flops(text: str, loops: Loops | None = None) -> dict[str, float]:
    """FLOPs of one run's matrix products, by the type of their factors.

    That is "bf16", "f32" and so on; "tf32" are float32 factors that a GPU may round.

    Args:
        loops: the course of loops without a known count; others take one round, and all branches
            of one alike.
    """
    module, courses = Module.of(text), loops or {}

    def of(name: str, shares: tuple[float, ...]) -> Counter[str]:
        total: Counter[str] = Counter()

        def add(part: Mapping[str, float], times: float) -> None:
            for dtype, count in part.items():
                total[dtype] += times * count  # type: ignore[assignment]

        for line in module.computations.get(name, {}).values():
            if line.op == "while":
                course = next((courses[rows] for rows in rows_of(line) if rows in courses), None)
                rounds = line.rounds or (course.rounds if course else 1)
                for called in line.called:
                    add(of(called, course.shares if course else ()), rounds)
            elif line.op == "conditional":
                even = (1 / len(line.called),) * len(line.called)
                taken = shares if len(shares) == len(line.called) else even
                for share, called in zip(taken, line.called, strict=True):
                    add(of(called, ()), share)
            elif line.op in ("fusion", "call", "map") or line.op.endswith("-start"):
                for called in line.called:
                    add(of(called, shares), 1)
            else:
                add(_product(module, line), 1)
        return total

    return dict(of(module.entry, ()))


def rows_of_loops(text: str) -> set[tuple[int, int]]:
    """The rows of each loop whose count the compiler does not know."""
    module = Module.of(text)
    lines = (line for part in module.computations.values() for line in part.values())
    loops = (line for line in lines if line.op == "while" and line.rounds is None)
    return {rows for line in loops for rows in rows_of(line)}


def rows_of(line: Instruction) -> list[tuple[int, int]]:
    """What may be the rows of a loop: tokens `s32[N, L]` whose lengths `s32[N]` it carries, too."""
    carried = arrays(line.type)
    return [
        (shape[0], shape[1])
        for dtype, shape in carried
        if dtype == "s32" and len(shape) == 2 and ("s32", shape[:1]) in carried
    ]


def _product(module: Module, line: Instruction) -> dict[str, float]:
    """FLOPs of one instruction, if it is a product: XLA's own, cuBLAS's or cuDNN's attention."""
    if line.op == "custom-call" and line.is_attention:
        return _attention(line)
    taken = [arrays(text) for text in module.operand_types(line)]
    factor = (taken[0] if taken and taken[0] else arrays(line.type))[:1]
    if line.op == "dot" and taken[0]:
        inner = math.prod(taken[0][0][1][axis] for axis in line.sizes("lhs_contracting_dims"))
        return {_rounded(factor[0][0], line): 2.0 * elements(line.type) * inner}
    if line.op == "convolution" and taken[1]:
        labels, kernel = re.search(r"dim_labels=\w+_(\w+)->", line.line), taken[1][0][1]
        inner = math.prod(kernel) // kernel[labels[1].index("o")] if labels else 1
        return {_rounded(factor[0][0], line): 2.0 * elements(line.type) * inner}
    if line.op == "custom-call" and _GEMM.search(line.line):
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.line)
        if axes and taken[0]:
            inner = math.prod(taken[0][0][1][int(axis)] for axis in re.findall(r"\d+", axes[1]))
            result = arrays(line.type)[0]  # what follows it is room to work in
            return {_rounded(factor[0][0], line): 2.0 * math.prod(result[1]) * inner}
    return {}


def _attention(line: Instruction) -> dict[str, float]:
    """Fused attention: two products forward, five backward, of scores `[B, H, Q, K]` and width d.

    Padded rows count in full, as if the kernel computed them. A causal mask halves the scores (Dao
    et al., arXiv 2205.14135, count alike).
    """
    sizes = _SCORES.search(line.line)
    dtype, first = arrays(line.type)[0]
    if sizes:
        scores = math.prod(map(int, re.findall(r"\d+", sizes[1])))
    else:  # the result is [B, H, Q, d], and a row attends to itself
        scores = math.prod(first[:3]) * first[2]
    flops = 2.0 * (5 if "Backward" in line.line else 2) * scores * first[-1]
    return {dtype: flops / 2 if _CAUSAL.search(line.line) else flops}


def _rounded(dtype: str, line: Instruction) -> str:
    """XLA lets a GPU round float32 factors to TF32 unless the program asks for the highest."""
    exact = "highest" in line.line or '"HIGHEST"' in line.line
    return TF32 if dtype == "f32" and not exact else dtype

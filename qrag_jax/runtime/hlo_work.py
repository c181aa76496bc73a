"""What one kernel of a compiled program has to do: FLOPs of its products, other FLOPs, and bytes.

All figures come from shapes. An array counts as read once and written once by each kernel. Of an
array that is only sliced or looked up, the parts taken count, not the whole; an array that is
updated in place counts by its update.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from qrag_jax.runtime.hlo import Instruction, Module, arrays, bytes_of, elements

# They make no kernel: names for what is there.
FREE = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "domain",
        "add-dependency",
    ]
)
# Inside of a fusion they are computed with what reads them.
_SEEN_THROUGH = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_MOVES = frozenset(
    [
        "copy",
        "reshape",
        "transpose",
        "broadcast",
        "iota",
        "concatenate",
        "pad",
        "reverse",
        "slice",
        "dynamic-slice",
        "gather",
        "dynamic-update-slice",
        "scatter",
        "bitcast-convert",
        "convert",
        "select",
    ]
)
# FLOPs of an element, roughly: a polynomial and what it begins and ends with.
_FUNCTIONS = {
    name: 10
    for name in [
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "erf",
        "tanh",
        "logistic",
        "sine",
        "cosine",
        "power",
        "divide",
        "sqrt",
        "rsqrt",
        "cbrt",
        "atan2",
        "tan",
    ]
}
_GEMM = re.compile(r'custom_call_target="__cu(?:blas|dnn)\$[^"]*(?:gemm|matmul)', re.IGNORECASE)
_SCORES = re.compile(r'"intermediate_tensor_shape".*?"dimensions": ?\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type": ?"(?:PADDING_)?CAUSAL"')
TF32 = "tf32"


@dataclasses.dataclass(frozen=True)
class Work:
    """What a kernel does.

    Attributes:
        products: FLOPs of matrix products, by the type of their factors: as HLO names it ("bf16",
            "f32"), or "tf32" for float32 factors that a GPU may round.
        other: FLOPs outside of products.
        read: bytes that it reads.
        written: bytes that it writes.
        sorted: elements along the dimension that it sorts; 0: it sorts nothing.
    """

    products: Mapping[str, float] = dataclasses.field(default_factory=dict)
    other: float = 0.0
    read: float = 0.0
    written: float = 0.0
    sorted: int = 0

    @property
    def bytes(self) -> float:
        """Bytes moved between a device's memory and its processors."""
        return self.read + self.written


def work_of(module: Module, line: Instruction) -> Work:
    """The work of one instruction that is run by itself: a fusion, a product, a copy…"""
    read, written = _moved(module, line)
    products, other = _flops(module, line)
    return Work(products, other, read, written, _sorted(module, line))


def _sorted(module: Module, line: Instruction) -> int:
    """Elements along the sorted dimension of a sort, also if it stands in a fusion."""
    if line.op == "fusion":
        inner = (_sorted(module, part) for name in line.called for part in _of(module, name))
        return max(inner, default=0)
    dimension = line.sizes("dimensions")
    return arrays(line.type)[0][1][dimension[0]] if line.op == "sort" and dimension else 0


def _flops(module: Module, line: Instruction) -> tuple[dict[str, float], float]:
    if line.op in ("fusion", "call", "map"):
        return _total(_flops(module, inner) for name in line.called for inner in _of(module, name))
    if line.op == "dot":
        return {_factor(module, line): 2.0 * elements(line.type) * _contracted(module, line)}, 0.0
    if line.op == "convolution":
        return {_factor(module, line): 2.0 * elements(line.type) * _window(module, line)}, 0.0
    if line.op == "custom-call":
        return _flops_of_call(module, line), 0.0
    if line.op == "sort":
        count = max(elements(text) for text in module.operand_types(line) or [line.type])
        return {}, float(count * max(math.ceil(math.log2(max(count, 2))), 1))
    if line.op in ("reduce", "reduce-window"):
        taken = module.operand_types(line)
        size = math.prod(_numbers(re.search(r"window=\{size=([\dx]+)", line.line)))
        # A window that slides takes so many additions for each place.
        return {}, float(elements(taken[0]) if line.op == "reduce" else elements(line.type) * size)
    if line.op in FREE or line.op in _MOVES:
        return {}, 0.0
    return {}, float(elements(line.type) * _FUNCTIONS.get(line.op, 1))


def _total(parts: Iterable[tuple[dict[str, float], float]]) -> tuple[dict[str, float], float]:
    products: dict[str, float] = defaultdict(float)
    other = 0.0
    for of_part, more in parts:
        other += more
        for dtype, flops in of_part.items():
            products[dtype] += flops
    return dict(products), other


def _flops_of_call(module: Module, line: Instruction) -> dict[str, float]:
    """cuBLAS's products and cuDNN's attention; nothing is known of other custom calls."""
    if line.is_attention:
        return _attention(line)
    if not _GEMM.search(line.line):
        return {}
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.line)
    taken = arrays(module.operand_types(line)[0])
    if not found or not taken:
        return {}
    inner = math.prod(taken[0][1][int(number)] for number in re.findall(r"\d+", found[1]))
    result = arrays(line.type)[0]  # what follows it is room to work in
    return {_rounded(taken[0][0], line): 2.0 * math.prod(result[1]) * inner}


def _attention(line: Instruction) -> dict[str, float]:
    """Fused attention: two products forward, five backward, of scores `[B, H, Q, K]` and width d.

    Padded rows count in full, as if the kernel computed them. A causal mask halves the scores (Dao
    et al., arXiv 2205.14135, count alike).
    """
    found = _SCORES.search(line.line)
    dtype, first = arrays(line.type)[0]
    if found:
        scores = math.prod(map(int, re.findall(r"\d+", found[1])))
    else:  # the result is [B, H, Q, d], and a row attends to itself
        scores = math.prod(first[:3]) * first[2]
    flops = 2.0 * (5 if "Backward" in line.line else 2) * scores * first[-1]
    return {dtype: flops / 2 if _CAUSAL.search(line.line) else flops}


def _contracted(module: Module, line: Instruction) -> int:
    taken = arrays(module.operand_types(line)[0])
    if not taken:
        return 1
    return math.prod(taken[0][1][number] for number in line.sizes("lhs_contracting_dims"))


def _window(module: Module, line: Instruction) -> int:
    """Products of one element of a convolution's result: the kernel without its output features."""
    kernel = arrays(module.operand_types(line)[1])
    labels = re.search(r"dim_labels=\w+_(\w+)->", line.line)
    if not kernel or not labels:
        return 1
    return math.prod(kernel[0][1]) // kernel[0][1][labels[1].index("o")]


def _factor(module: Module, line: Instruction) -> str:
    taken = arrays(module.operand_types(line)[0])
    return _rounded(taken[0][0] if taken else arrays(line.type)[0][0], line)


def _rounded(dtype: str, line: Instruction) -> str:
    """XLA lets a GPU round float32 factors to TF32 unless the program asks for the highest."""
    exact = "highest" in line.line or '"HIGHEST"' in line.line
    return TF32 if dtype == "f32" and not exact else dtype


def _numbers(found: re.Match[str] | None) -> list[int]:
    return [int(number) for number in found[1].split("x")] if found else [1]


def _of(module: Module, name: str) -> Iterable[Instruction]:
    return module.computations.get(name, {}).values()


# ---- bytes


def _moved(module: Module, line: Instruction) -> tuple[float, float]:
    """Bytes read and written by an instruction that is run by itself."""
    taken = module.operand_types(line)
    if line.op == "fusion":
        inside = module.computations.get(line.called[0], {})
        read = sum(touched(module, inside, number) for number in range(len(taken)))
        return read, _written(module, inside, line)
    if line.op in _SLICES:
        return float(bytes_of(line.type)), float(bytes_of(line.type))
    if line.op in ("dynamic-update-slice", "scatter"):
        update = float(bytes_of(taken[-1 if line.op == "scatter" else 1]))
        # A scatter reads what it adds to.
        return update * (2 if line.op == "scatter" else 1), update
    if line.op == "custom-call":
        results = arrays(line.type)
        room = results[-1][0] in ("s8", "u8") and len(results) > 1  # cuBLAS's and cuDNN's
        kept = bytes_of(line.type)
        if room:
            kept -= math.prod(results[-1][1])
        return float(sum(map(bytes_of, taken))), float(kept)
    return float(sum(map(bytes_of, taken))), float(bytes_of(line.type))


def touched(module: Module, inside: Mapping[str, Instruction], number: int) -> float:
    """Bytes that a fusion reads of its operand of this number."""
    found = [
        line
        for line in inside.values()
        if line.op == "parameter" and f" parameter({number})" in line.line
    ]
    if not found:
        return 0.0
    whole, total = float(bytes_of(found[0].type)), 0.0
    readers: dict[str, list[Instruction]] = defaultdict(list)
    for line in inside.values():
        for name in set(line.operands):
            readers[name].append(line)
    left = [found[0].name]
    while left:
        name = left.pop()
        for reader in readers[name]:
            if reader.op in _SLICES and reader.operands[0] == name:
                total += bytes_of(reader.type)
            elif reader.op in ("dynamic-update-slice", "scatter") and reader.operands[0] == name:
                pass  # changed in place: `_written` counts the update
            elif reader.op in _SEEN_THROUGH:
                left.append(reader.name)
            elif reader.op == "fusion":
                inner = module.computations.get(reader.called[0], {})
                places = [i for i, given in enumerate(reader.operands) if given == name]
                total += sum(touched(module, inner, place) for place in places)
            else:
                return whole
        if not readers[name]:  # it is a result itself
            return whole
        if total >= whole:
            return whole
    return total


def _written(module: Module, inside: Mapping[str, Instruction], line: Instruction) -> float:
    """Bytes that a fusion writes; those of an update in place, and what it adds to."""
    root = next((inner for inner in inside.values() if inner.is_root), None)
    if root is None:
        return float(bytes_of(line.type))
    results = [inside[name] for name in root.operands] if root.op == "tuple" else [root]
    return float(sum(_written_by(inside, result) for result in results))


def _written_by(inside: Mapping[str, Instruction], result: Instruction) -> float:
    while result.op in ("bitcast", "reshape") and result.operands[0] in inside:
        result = inside[result.operands[0]]
    if result.op == "dynamic-update-slice":
        return bytes_of(inside[result.operands[1]].type)
    if result.op == "scatter":
        return 2 * bytes_of(inside[result.operands[-1]].type)  # it reads what it adds to
    return bytes_of(result.type)

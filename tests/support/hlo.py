"""Reads from the HLO text of a compiled program what it does: what it sends, computes and asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from qrag_jax.runtime.aot import ATTENTION, Array, Instruction, arrays, instructions, rows_of

# Operations that wait for the host, and targets of custom calls that call it.
_HOST = ("infeed", "outfeed", "send", "recv")
_IN_HOST_MEMORY = "S(5)"  # a memory space, in a layout
_CALLBACK = re.compile(r'custom_call_target="[^"]*(callback|host)[^"]*"', re.IGNORECASE)
# Operations that send, and products by themselves or by a library. A TPU's compiler writes products
# as convolutions.
SENDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_PRODUCT = re.compile(r'custom_call_target="__cu(blas|dnn)\$[^"]*(gemm|matmul|conv)', re.IGNORECASE)
_SOURCE = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')


class Collective(NamedTuple):
    """One instruction that sends: its kind, and every array it takes or gives."""

    kind: str
    arrays: frozenset[Array]


def collectives(text: str) -> list[Collective]:
    """Everything a program sends; the halves of an asynchronous pair count as one."""
    lines = list(instructions(text))
    types = {line.name: line.type for line in lines}
    found = []
    for line in lines:
        kind = line.op.removesuffix("-start")
        if kind in SENDS:
            operands = line.line.partition(f" {line.op}(")[2].split(")", 1)[0]
            shown = " ".join([line.type, operands, *(types.get(n, "") for n in line.operands)])
            found.append(Collective(kind, frozenset(arrays(shown))))
    return found


def unexpected(text: str, allowed: Mapping[str, Iterable[tuple[int, ...]]]) -> list[str]:
    """The float32 arrays a program has no reason to send; nothing if all is well.

    Args:
        text: the program.
        allowed: for each kind of `SENDS`, the shapes that may take part in it. Scalars
            may always be summed.
    """
    shapes = {kind: {tuple(shape) for shape in found} for kind, found in allowed.items()}
    shapes["all-reduce"] = shapes.get("all-reduce", set()) | {()}
    return [
        f"{kind} of {dtype}{list(shape)}"
        for kind, sent in collectives(text)
        for dtype, shape in sorted(sent)
        if kind not in shapes or (dtype == "f32" and shape not in shapes[kind])
    ]


def donated(text: str) -> int:
    """Number of inputs whose buffers an output takes over."""
    header = text.splitlines()[0].partition("input_output_alias=")[2].partition(" }")[0]
    return header.count("-alias)")


def times_run(lines: Iterable[Instruction]) -> dict[str, int]:
    """How often each computation runs in one run of the program.

    A loop runs as often as the compiler knows, else it counts as one round; of a branch all ways
    count.
    """
    callers: dict[str, list[tuple[str, int]]] = {}
    for line in lines:
        callers.setdefault(line.computation, [])
        for name in line.called:
            callers.setdefault(name, []).append((line.computation, line.rounds or 1))
    found: dict[str, int] = {}

    def times(name: str) -> int:
        if name not in found:
            by = callers.get(name, [])
            found[name] = sum(times(caller) * rounds for caller, rounds in by) if by else 1
        return found[name]

    return {name: times(name) for name in callers}


def attention_calls(text: str) -> tuple[int, int]:
    """How often cuDNN's fused attention runs (see `times_run`): forward, and backward."""
    lines, forward, backward = list(instructions(text)), 0, 0
    times = times_run(lines)
    for line in lines:
        if found := ATTENTION.search(line.line):
            if "Backward" in found[1]:
                backward += times[line.computation]
            else:
                forward += times[line.computation]
    return forward, backward


def rows_of_loops(text: str) -> set[tuple[int, int]]:
    """The rows of each loop whose count the compiler does not know."""
    loops = (line for line in instructions(text) if line.op == "while" and line.rounds is None)
    return {rows for line in loops for rows in rows_of(line)}


class Product(NamedTuple):
    """A matrix product: `result = factor × factor`, and the operation of JAX that it is part of.

    source: such as "jit(f)/rt,td->rd/dot_general"; "" if the compiler does not tell.
    """

    shapes: str
    source: str


def products(text: str, dtype: str = "f32") -> list[Product]:
    """The matrix products of which a factor has this type."""
    lines = list(instructions(text))
    types = {(line.computation, line.name): line.type for line in lines}
    found = []
    for line in lines:
        if line.op not in ("dot", "convolution") and not _PRODUCT.search(line.line):
            continue
        factors = [types.get((line.computation, name), "") for name in line.operands[:2]]
        if any(factor.startswith(f"{dtype}[") for factor in factors):
            plain = [re.sub(r"\{.*", "", part).lstrip("(") for part in (line.type, *factors)]
            source = _SOURCE.search(line.line)
            shapes = f"{plain[0]} = {' × '.join(plain[1:])}"
            found.append(Product(shapes, source[1] if source else ""))
    return found


def asks_host(text: str) -> list[str]:
    """Instructions that wait for the host or call it."""
    return [
        line.name
        for line in instructions(text)
        if line.op.removesuffix("-start").removesuffix("-done") in _HOST or calls_host(line.line)
    ]


def calls_host(line: str) -> bool:
    """Whether a line of a program calls a function of the host."""
    return _CALLBACK.search(line) is not None


# ------------------------------------------------------------ what depends on threads

# Compiled programs have % before names, lowered ones have none.
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{\s*$")
_ROOT = re.compile(r"^\s*ROOT %?[\w.-]+ = \S+ ([\w-]+)\(")
_SCATTER = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) scatter\(.*to_apply=%?([\w.-]+)")
_BACKWARD = re.compile(
    r'^\s*(?:ROOT )?%?([\w.-]+) = .*custom_call_target="__cudnn\$fmha\w*Backward"'
)
_MARKED = re.compile(r"\bforce_deterministic\W+true\b")
_FLOAT = re.compile(r"\b(?:f|bf)\d+")  # sums of integers are the same in any order
_ROUNDED = {"add", "subtract", "multiply"}


def nondeterministic(text: str) -> list[str]:
    """Names of the instructions whose results depend on the order of a GPU's threads.

    Args:
        text: the program, compiled or lowered.

    Returns:
        Scatters that add floats where an index may be there twice, and gradients of attention that
        are not marked as deterministic. Scatters that only put values in place are not among them:
        this package writes no place twice.
    """
    roots, computation = {}, ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            computation = head[1]
        elif root := _ROOT.match(line):
            roots[computation] = root[1]
    found = []
    for line in text.splitlines():
        if (scatter := _SCATTER.match(line)) and "unique_indices=true" not in line:
            name, kind, combined = scatter.groups()
            if _FLOAT.search(kind) and roots.get(combined) in _ROUNDED:
                found.append(name)
        elif (backward := _BACKWARD.match(line)) and not _MARKED.search(line):
            found.append(backward[1])
    return found

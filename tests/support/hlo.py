"""Reads from the HLO text of a compiled program what it does: what it sends, computes and asks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

# ------------------------------------------------------------ instructions

# A computation's head, `%name (…) -> … {` or `ENTRY %name …`; lowered programs have no %.
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{\s*$")
# `%name = TYPE op(operands)…`; a TYPE may be a tuple with comments.
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ATTENTION = re.compile(r'custom_call_target="(__cudnn\$fmha[^"]*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
    r"|branch_computations=\{([^}]*)\}"
)

Array = tuple[str, tuple[int, ...]]  # element type and shape


class Instruction(NamedTuple):
    """One line of a program."""

    computation: str  # the name of that in which it stands
    name: str
    type: str  # what it gives
    op: str  # such as "dot", "fusion", "while"
    operands: tuple[str, ...]  # names of the instructions that it takes
    line: str  # the whole text

    @property
    def rounds(self) -> int:
        """How often a loop runs; 1 if the compiler does not know, and for other operations."""
        found = _ROUNDS.search(self.line) if self.op == "while" else None
        return int(found[1]) if found else 1

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        found = []
        for one, several in _CALLED.findall(self.line):
            found += [one] if one else re.findall(r"[\w.-]+", several)
        return found


def instructions(text: str) -> Iterator[Instruction]:
    """All instructions of a program, computation after computation."""
    computation = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            computation = head[1]
        elif match := _LINE.match(line):
            operands = line[match.end() :].split(")", 1)[0]
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            yield Instruction(computation, match[1], match[2], match[3], names, line)


def arrays(text: str) -> list[Array]:
    """The arrays of a type, those of a tuple one after the other."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(text)
    ]


# ------------------------------------------------------------ what a program does

# Operations that wait for the host, and targets of custom calls that call it.
_HOST = ("infeed", "outfeed", "send", "recv")
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


def donated(text: str) -> int:
    """Number of inputs whose buffers an output takes over."""
    header = text.splitlines()[0].partition("input_output_alias=")[2].partition(" }")[0]
    return header.count("-alias)")


def attention_calls(text: str) -> tuple[int, int]:
    """How often one run of the program calls cuDNN's fused attention: forward, and backward.

    A loop runs as often as the compiler knows, else it counts as one round; of a branch all ways
    count.
    """
    lines = list(instructions(text))
    callers: dict[str, list[tuple[str, int]]] = {}
    for line in lines:
        for name in line.called:
            callers.setdefault(name, []).append((line.computation, line.rounds))

    @cache
    def times(name: str) -> int:
        by = callers.get(name)
        return sum(times(caller) * rounds for caller, rounds in by) if by else 1

    calls = [(_ATTENTION.search(line.line), line.computation) for line in lines]
    found = [("Backward" in match[1], times(where)) for match, where in calls if match]
    backward = sum(count for is_backward, count in found if is_backward)
    return sum(count for _, count in found) - backward, backward


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
        if line.op.removesuffix("-start").removesuffix("-done") in _HOST
        or _CALLBACK.search(line.line)
    ]


# ------------------------------------------------------------ what depends on threads

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
    lines, found = list(instructions(text)), []
    roots = {line.computation: line.op for line in lines if line.line.lstrip().startswith("ROOT ")}
    for line in lines:
        if line.op == "scatter":
            adds = {roots.get(name) for name in line.called} & _ROUNDED
            is_once = "unique_indices=true" in line.line
            found += [line.name] if adds and not is_once and _FLOAT.search(line.type) else []
        elif (call := _ATTENTION.search(line.line)) and call[1].endswith("Backward"):
            found += [] if _MARKED.search(line.line) else [line.name]
    return found

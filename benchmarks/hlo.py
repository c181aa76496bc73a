"""Reads from the HLO text of a compiled program what it does: what it sends, computes and asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

SENDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Operations that wait for the host, and targets of custom calls that call it.
_HOST = ("infeed", "outfeed", "send", "recv")
_IN_HOST_MEMORY = "S(5)"  # a memory space, in a layout
_CALLBACK = re.compile(r'custom_call_target="[^"]*(callback|host)[^"]*"', re.IGNORECASE)
_PRODUCT = re.compile(r'custom_call_target="__cu(blas|dnn)\$[^"]*(gemm|matmul|conv)', re.IGNORECASE)
_PRODUCTS = ("dot", "convolution")  # a TPU's compiler writes products as convolutions
_ATTENTION = re.compile(r'custom_call_target="(__cudnn\$fmha[^"]*)"')
_SOURCE = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
# A computation's head, `%name (…) -> … {` or `ENTRY %name …`.
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$")
# `%name = TYPE op(operands)…`; a TYPE may be a tuple with comments.
_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
    r"|branch_computations=\{([^}]*)\}"
)

Array = tuple[str, tuple[int, ...]]  # element type and shape


class Instruction(NamedTuple):
    """One line of a program.

    computation: the name of the computation that it stands in.
    type: what it gives.
    op: such as "dot", "fusion", "while".
    operands: names of the instructions that it takes.
    line: the whole text.
    """

    computation: str
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    line: str

    @property
    def is_root(self) -> bool:
        """Whether this is the result of its computation."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def rounds(self) -> int | None:
        """How often a loop runs; None if the compiler does not know, and for other operations."""
        found = _ROUNDS.search(self.line) if self.op == "while" else None
        return int(found[1]) if found else None

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        found = []
        for one, several in _CALLED.findall(self.line):
            found += [one] if one else re.findall(r"[\w.-]+", several)
        return found

    @property
    def is_product(self) -> bool:
        """Whether this is a matrix product, by itself or by a library."""
        return self.op in _PRODUCTS or _PRODUCT.search(self.line) is not None

    @property
    def is_attention(self) -> bool:
        """Whether this is cuDNN's fused attention."""
        return _ATTENTION.search(self.line) is not None

    @property
    def kind_sent(self) -> str:
        """The collective that this is or begins; "" for another operation."""
        kind = self.op.removesuffix("-start")
        return kind if kind in SENDS else ""


class Collective(NamedTuple):
    """One instruction that sends: its kind, and every array it takes or gives."""

    kind: str
    arrays: frozenset[Array]


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


def collectives(text: str) -> list[Collective]:
    """Everything a program sends; the halves of an asynchronous pair count as one."""
    lines = list(instructions(text))
    types = {line.name: line.type for line in lines}
    found = []
    for line in lines:
        if line.kind_sent:
            operands = line.line.partition(f" {line.op}(")[2].split(")", 1)[0]
            shown = " ".join([line.type, operands, *(types.get(n, "") for n in line.operands)])
            found.append(Collective(line.kind_sent, frozenset(_arrays(shown))))
    return found


def unexpected(text: str, allowed: Mapping[str, Iterable[tuple[int, ...]]]) -> list[str]:
    """The float32 arrays a program has no reason to send; nothing if all is well.

    Args:
        text: the program.
        allowed: for each kind of `SENDS`, the shapes that may take part in it. Scalars may always
            be summed.
    """
    shapes = {kind: {tuple(shape) for shape in found} for kind, found in allowed.items()}
    shapes["all-reduce"] = shapes.get("all-reduce", set()) | {()}
    return [
        f"{kind} of {dtype}{list(shape)}"
        for kind, arrays in collectives(text)
        for dtype, shape in sorted(arrays)
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
        if found := _ATTENTION.search(line.line):
            if "Backward" in found[1]:
                backward += times[line.computation]
            else:
                forward += times[line.computation]
    return forward, backward


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
        if not line.is_product:
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


def _arrays(text: str) -> set[Array]:
    return {
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(text)
    }

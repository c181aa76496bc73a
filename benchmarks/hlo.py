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
_CALLBACK = re.compile(r'custom_call_target="[^"]*(callback|host)[^"]*"', re.IGNORECASE)
_PRODUCT = re.compile(r'custom_call_target="__cu(blas|dnn)\$[^"]*(gemm|matmul|conv)', re.IGNORECASE)
# A computation's head, `%name (…) -> … {` or `ENTRY %name …`.
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$")
# `%name = TYPE op(operands)…`; a TYPE may be a tuple with comments.
_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
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
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        found = []
        for one, several in _CALLED.findall(self.line):
            found += [one] if one else re.findall(r"[\w.-]+", several)
        return found

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


def attention_calls(text: str) -> tuple[int, int]:
    """Calls of cuDNN's fused attention: forward, and backward."""
    targets = re.findall(r'custom_call_target="(__cudnn\$fmha[^"]*)"', text)
    backward = sum("Backward" in target for target in targets)
    return len(targets) - backward, backward


def products(text: str, dtype: str = "f32") -> list[str]:
    """The matrix products of which a factor has this type, as `result = factor × factor`."""
    lines = list(instructions(text))
    types = {(line.computation, line.name): line.type for line in lines}
    found = []
    for line in lines:
        if line.op != "dot" and not _PRODUCT.search(line.line):
            continue
        factors = [types.get((line.computation, name), "") for name in line.operands[:2]]
        if any(factor.startswith(f"{dtype}[") for factor in factors):
            plain = [re.sub(r"\{.*", "", part).lstrip("(") for part in (line.type, *factors)]
            found.append(f"{plain[0]} = {' × '.join(plain[1:])}")
    return found


def asks_host(text: str) -> list[str]:
    """Instructions that wait for the host or call it."""
    return [
        line.name
        for line in instructions(text)
        if line.op.removesuffix("-start").removesuffix("-done") in _HOST
        or _CALLBACK.search(line.line)
    ]


def sends_inside_branches(text: str) -> list[str]:
    """Collectives inside a branch, or a loop of which the compiler knows no number of rounds.

    The course of such may differ between devices, and one device would wait for ever.
    """
    lines = list(instructions(text))
    calls: dict[str, set[str]] = {}
    inside: set[str] = set()
    for line in lines:
        calls.setdefault(line.computation, set()).update(line.called)
        counted = "known_trip_count" in line.line
        if line.op == "conditional" or (line.op == "while" and not counted):
            inside.update(line.called)
    reached, left = set(inside), list(inside)
    while left:
        for name in calls.get(left.pop(), set()) - reached:
            reached.add(name)
            left.append(name)
    return [line.name for line in lines if line.kind_sent and line.computation in reached]


def _arrays(text: str) -> set[Array]:
    return {
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(text)
    }

"""Reads the HLO text of a compiled program: its computations and their instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
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
# A computation's head, `%name (…) -> … {` or `ENTRY %name …`.
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
# `%name = TYPE op(operands)…`; a TYPE may be a tuple with comments.
_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PRODUCT = re.compile(r'custom_call_target="__cu(blas|dnn)\$[^"]*(gemm|matmul|conv)', re.IGNORECASE)
_PRODUCTS = ("dot", "convolution")  # a TPU's compiler writes products as convolutions
ATTENTION = re.compile(r'custom_call_target="(__cudnn\$fmha[^"]*)"')
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
        return ATTENTION.search(self.line) is not None

    @property
    def kind_sent(self) -> str:
        """The collective that this is or begins; "" for another operation."""
        kind = self.op.removesuffix("-start")
        return kind if kind in SENDS else ""

    def sizes(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `lhs_contracting_dims={1,2}`; () without it."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.line)
        return tuple(int(size) for size in found[1].split(",") if size) if found else ()


class Module(NamedTuple):
    """A program; the instructions of a compiled one are in the order in which they are run."""

    computations: dict[str, dict[str, Instruction]]
    entry: str  # the name of the computation that is run first

    @classmethod
    def of(cls, text: str) -> Module:
        """The program of a text; a ValueError if it has no entry computation."""
        computations: dict[str, dict[str, Instruction]] = {}
        for line in instructions(text):
            computations.setdefault(line.computation, {})[line.name] = line
        heads = (_HEAD.match(line) for line in text.splitlines() if line.startswith("ENTRY "))
        entry = next((head[2] for head in heads if head), None)
        if entry is None or entry not in computations:
            raise ValueError("this HLO text has no entry computation")
        return cls(computations, entry)

    def operand_types(self, line: Instruction) -> list[str]:
        """The types of what an instruction takes; "" for one that is not found."""
        around = self.computations[line.computation]
        return [around[name].type if name in around else "" for name in line.operands]


def instructions(text: str) -> Iterator[Instruction]:
    """All instructions of a program, computation after computation."""
    computation = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            computation = head[2]
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


def elements(text: str) -> int:
    """Elements of all arrays of a type."""
    return sum(math.prod(shape) for _, shape in arrays(text))

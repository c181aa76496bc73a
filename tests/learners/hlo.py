"""What a compiled program sends between devices, read from its HLO text."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
# `%name = TYPE op(operands)…`; a TYPE may be a tuple with comments.
_LINE = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")

Array = tuple[str, tuple[int, ...]]  # element type and shape


class Collective(NamedTuple):
    """One instruction that sends: its kind, and every array it takes or gives."""

    kind: str
    arrays: frozenset[Array]


def collectives(text: str) -> list[Collective]:
    """Everything a program sends; the halves of an asynchronous pair count as one."""
    matches = [(line, _LINE.match(line)) for line in text.splitlines()]
    types = {match[1]: match[2] for _, match in matches if match}
    found = []
    for line, match in matches:
        kind = match[3].removesuffix("-start") if match else ""
        if match and kind in SENDS:
            operands = line[match.end() :].split(")", 1)[0]
            names = re.findall(r"%[\w.-]+", operands)
            shown = " ".join([match[2], operands, *(types.get(name, "") for name in names)])
            found.append(Collective(kind, frozenset(_arrays(shown))))
    return found


def unexpected(text: str, parameters: Iterable[tuple[int, ...]], split: bool) -> list[str]:
    """What a training step has no reason to send; nothing if all is well.

    Args:
        parameters: shapes of the parameters, whole and as a device holds them.
        split: parameters are split; else they may not be gathered or scattered.
    """
    shapes = {("f32", ()), *(("f32", tuple(shape)) for shape in parameters)}
    kinds = {"all-reduce", "all-gather", "reduce-scatter"} if split else {"all-reduce"}
    return [
        f"{kind} of {dtype}{list(shape)}"
        for kind, arrays in collectives(text)
        for dtype, shape in sorted(arrays)
        if kind not in kinds or (dtype, shape) not in shapes
    ]


def donated(text: str) -> int:
    """Number of inputs whose buffers an output takes over."""
    header = text.splitlines()[0].partition("input_output_alias=")[2].partition(" }")[0]
    return header.count("-alias)")


def _arrays(text: str) -> set[Array]:
    return {
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(text)
    }

"""Reads from a scheduled program what the device runs: kernels, loops, and what hides sending.

The text must be that of a compiled program for a GPU or a TPU: its computations list instructions
in the order in which they are started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qrag_jax.runtime.hlo import SENDS, Instruction, instructions
from tests.support.hlo import times_run

# Start nothing on the device: they name values, or only order other instructions.
_NO_KERNEL = {
    "add-dependency",
    "after-all",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
_STEPS = ("while", "conditional", "call")  # whose computations' instructions run one by one
_COMPUTES = ("fusion", "dot", "convolution", "custom-call", *_STEPS)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Launches(NamedTuple):
    """What a device starts.

    kernels: instructions that start a kernel, a copy or a collective, as the program has them.
    launches: how often these run in one run of the program: loops as often as the compiler knows,
        else once, and all ways of a branch.
    host_loops, host_branches: loops and branches of which the host reads the condition on the
        device: on GPUs all branches, and loops of which the compiler knows no number of rounds.
    """

    kernels: int
    launches: int
    host_loops: int
    host_branches: int


class Overlap(NamedTuple):
    """Collectives of a program, each counted once wherever it stands.

    total: their number.
    hidden: of these, those during which the device computes: between their start and their end
        stands a fusion, a product, a kernel of a library, or a loop.
    behind_products: of these, those during which it computes a matrix product, attention or a
        whole loop. The others are hidden by copies and the like, which may be too short.
    total_bytes, hidden_bytes: bytes of the results.
    exposed: names of those that are not hidden.
    """

    total: int
    hidden: int
    behind_products: int
    total_bytes: int
    hidden_bytes: int
    exposed: tuple[str, ...]


def launches(text: str) -> Launches:
    """Counts what a device starts."""
    lines = list(instructions(text))
    return _started(lines, times_run(lines), _run_in_order(lines, _outermost(lines)))


def launches_of_rounds(text: str) -> list[Launches]:
    """What a device starts in one round of each outermost loop that the host asks, in order."""
    lines = list(instructions(text))
    times, outermost = times_run(lines), set(_outermost(lines))
    return [
        _started(lines, times, _run_in_order(lines, line.called))
        for line in lines
        if line.computation in outermost and line.op == "while" and line.rounds is None
    ]


def _started(
    lines: Sequence[Instruction], times: Mapping[str, int], run: Sequence[str]
) -> Launches:
    """What the computations `run` start, which run so many `times`."""
    names = set(run)
    inside = [line for line in lines if line.computation in names]
    kernels = [line for line in inside if _starts_kernel(line)]
    return Launches(
        len(kernels),
        sum(times[line.computation] for line in kernels),
        sum(line.op == "while" and line.rounds is None for line in inside),
        sum(line.op == "conditional" for line in inside),
    )


def overlap(text: str) -> Overlap:
    """Which collectives run while the device computes."""
    by_computation: dict[str, list[Instruction]] = {}
    lines = list(instructions(text))
    for line in lines:
        by_computation.setdefault(line.computation, []).append(line)
    sends = {line.computation for line in lines if line.kind_sent}
    multiplies = {line.computation for line in lines if line.is_product}

    def is_long(line: Instruction) -> bool:
        fused = line.op == "fusion" and not multiplies.isdisjoint(line.called)
        return fused or line.op in _STEPS or line.is_product or line.is_attention

    total = hidden = behind = total_bytes = hidden_bytes = 0
    exposed = []
    for name in _run_in_order(lines, _outermost(lines)):
        inside = by_computation.get(name, [])
        for place, line in enumerate(inside):
            wraps = line.op == "async-start" and not sends.isdisjoint(line.called)
            if not line.kind_sent and not wraps:
                continue
            end = _end(inside, place)
            size = _bytes(inside[end].type)
            during = inside[place + 1 : end]
            total, total_bytes = total + 1, total_bytes + size
            behind += any(map(is_long, during))
            if any(other.op in _COMPUTES for other in during):
                hidden, hidden_bytes = hidden + 1, hidden_bytes + size
            else:
                exposed.append(line.name)
    return Overlap(total, hidden, behind, total_bytes, hidden_bytes, tuple(exposed))


def _outermost(lines: Sequence[Instruction]) -> list[str]:
    """The computations that no other calls: the entry."""
    called = {name for line in lines for name in line.called}
    found = dict.fromkeys(line.computation for line in lines)
    return [name for name in found if name not in called]


def _run_in_order(lines: Sequence[Instruction], outermost: Sequence[str]) -> list[str]:
    """The computations whose instructions are started one by one: these, loops and branches.

    Those of fusions, reductions and asynchronous operations are parts of one instruction.
    """
    found = list(outermost)
    reached, left = set(found), list(found)
    steps: dict[str, list[str]] = {}
    for line in lines:
        if line.op in _STEPS:
            steps.setdefault(line.computation, []).extend(line.called)
    while left:
        for name in steps.get(left.pop(), []):
            if name not in reached:
                reached.add(name)
                found.append(name)
                left.append(name)
    return found


def _starts_kernel(line: Instruction) -> bool:
    return line.op not in _NO_KERNEL and not line.op.endswith(("-done", "-update"))


def _end(inside: Sequence[Instruction], place: int) -> int:
    """The place where a collective ends: its own, if it is not asynchronous."""
    start = inside[place]
    if start.op in SENDS:
        return place
    names = {start.name}
    for number in range(place + 1, len(inside)):
        line = inside[number]
        if names.isdisjoint(line.operands):
            continue
        if line.op.endswith("-update"):
            names.add(line.name)
        elif line.op.endswith("-done"):
            return number
    return place


def _bytes(shown: str) -> int:
    total = 0
    for dtype, sizes in _ARRAY.findall(shown):
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        total += count * _BYTES.get(dtype, 4)
    return total

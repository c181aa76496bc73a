"""Estimates how long a compiled program takes, from its HLO text and a device's peaks.

A kernel takes `max(products / peak + other FLOPs / peak, bytes / bandwidth)` and its start, as if
it reached the peaks (Williams et al., 2009, "Roofline"). Kernels follow each other. Collectives go
round a ring (Thakur et al., 2005) and hide behind the kernels between their start and their end.
Counted loops are multiplied. Of loops over blocks of rows (`models.compute.ragged`) the caller says
how many rounds there are and which branch they take.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from qrag_jax.runtime.device_speeds import Speeds
from qrag_jax.runtime.hlo import Instruction, Module, arrays, bytes_of, instructions
from qrag_jax.runtime.hlo_work import FREE, Work, work_of

PRODUCTS, ARITHMETIC, MEMORY = "products", "other arithmetic", "memory"
LAUNCHES, COLLECTIVES, HOST = "starts of kernels", "collectives", "waits for the host"
BOUNDS = (PRODUCTS, ARITHMETIC, MEMORY, LAUNCHES, COLLECTIVES, HOST)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The course of a loop over blocks.

    Attributes:
        rounds: mean number of rounds.
        shares: share of the rounds that take each branch; (): all branches alike.
    """

    rounds: float = 1.0
    shares: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What the text of a program does not say.

    Attributes:
        loops: the course of each loop without a known count, by the rows that it carries: their
            number N and width L, of tokens `s32[N,L]` with lengths `s32[N]`.
        other: the course of loops of which `loops` says nothing.
    """

    loops: Mapping[tuple[int, int], Rounds] = dataclasses.field(default_factory=dict)
    other: Rounds = Rounds()


@dataclasses.dataclass
class Kind:
    """All kernels of one kind: their number, their seconds, their FLOPs and their bytes."""

    count: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, other: Kind, times: float) -> None:
        """Adds another kind's figures so many times."""
        self.count += times * other.count
        self.seconds += times * other.seconds
        self.flops += times * other.flops
        self.bytes += times * other.bytes


@dataclasses.dataclass
class Estimate:
    """The time of one run of a program.

    Attributes:
        speeds: the device.
        parts: seconds by what bounds them, see `BOUNDS`.
        products: FLOPs of products by the type of their factors.
        kinds: figures by kind of instruction.
        loops: rounds that were taken for each loop without a known count, by its rows; None stands
            for loops that carry no rows.
    """

    speeds: Speeds
    parts: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    products: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    kinds: dict[str, Kind] = dataclasses.field(default_factory=lambda: defaultdict(Kind))
    loops: dict[tuple[int, int] | None, float] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of one run."""
        return sum(self.parts.values())

    @property
    def flops(self) -> float:
        """FLOPs of all products, with padding and with what is computed twice."""
        return sum(self.products.values())

    @property
    def kernels(self) -> float:
        """Number of kernels."""
        return sum(kind.count for kind in self.kinds.values())

    @property
    def bound(self) -> str:
        """What takes most of the time."""
        return max(BOUNDS, key=lambda bound: self.parts.get(bound, 0.0))

    @property
    def main_type(self) -> str:
        """The type of the factors of most products; "f32" if there are none."""
        return max(self.products, key=self.products.__getitem__, default="f32")

    def share_of_peak(self, needed: float | None = None) -> float:
        """FLOP/s as a share of the peak of `main_type`.

        Args:
            needed: FLOPs that count; None: those of all the program's products.
        """
        if not self.seconds:
            return 0.0
        flops = self.flops if needed is None else needed
        return flops / self.seconds / self.speeds.peak(self.main_type)

    def add(self, other: Estimate, times: float) -> None:
        """Adds what another part of the program takes, so many times."""
        for bound, seconds in other.parts.items():
            self.parts[bound] += times * seconds
        for dtype, flops in other.products.items():
            self.products[dtype] += times * flops
        for name, kind in other.kinds.items():
            self.kinds[name].add(kind, times)
        self.loops |= other.loops


def estimate(text: str, speeds: Speeds, assumed: Assumptions | None = None) -> Estimate:
    """The time of a program on one of its devices.

    Args:
        text: the HLO of a compiled program.
        speeds: the device.
        assumed: the course of its loops.

    Raises:
        ValueError: the text has no entry computation.
    """
    module = Module.of(text)
    return _Walk(module, speeds, assumed or Assumptions()).run(module.entry, ())


def estimates_of_rounds(text: str, speeds: Speeds) -> list[Estimate]:
    """The time of one round of each outermost loop of unknown course, in order.

    Loops inside of it take one round. What the host is asked before a round is not in it.

    Raises:
        ValueError: the text has no entry computation.
    """
    module = Module.of(text)
    walk, found = _Walk(module, speeds, Assumptions()), []
    for line in module.computations[module.entry].values():
        if line.op == "while" and line.rounds is None:
            one = Estimate(speeds)
            for name in line.called:
                one.add(walk.run(name, ()), 1.0)
            found.append(one)
    return found


def rows_of_loops(text: str) -> set[tuple[int, int]]:
    """The rows, as in `Assumptions.loops`, of all loops of a program without a known count."""
    return {
        rows
        for line in instructions(text)
        if line.op == "while" and line.rounds is None
        for rows in list(_rows(line))[:1]
    }


@dataclasses.dataclass
class _Walk:
    module: Module
    speeds: Speeds
    assumed: Assumptions

    def run(self, name: str, shares: tuple[float, ...]) -> Estimate:
        """One run of a computation; `shares` are those of the loop whose body it is."""
        found = Estimate(self.speeds)
        free_link, pending = 0.0, {}
        for line in self.module.computations.get(name, {}).values():
            if line.kind_sent:
                seconds = self._sent(found, line)
                free_link = max(found.seconds, free_link) + seconds
                pending[line.name] = free_link
            if line.op.endswith("-done") and line.operands[0] in pending:
                _wait(found, pending[line.operands[0]])
            elif line.kind_sent:
                if not line.op.endswith("-start") or '"is_sync":true' in line.line:
                    _wait(found, pending[line.name])
            else:
                self._instruction(found, line, shares)
        return found

    def _instruction(self, found: Estimate, line: Instruction, shares: tuple[float, ...]) -> None:
        if line.op == "while":
            self._loop(found, line)
        elif line.op == "conditional":
            called = line.called
            if len(shares) != len(called):
                shares = (1 / len(called),) * len(called)
            for share, branch in zip(shares, called, strict=True):
                if share:
                    found.add(self.run(branch, ()), share)
            found.parts[HOST] += self.speeds.host_wait
        elif line.op == "call" or (line.op.endswith("-start") and line.called):
            for name in line.called:
                found.add(self.run(name, shares), 1.0)
        elif line.op not in FREE and not line.op.endswith(("-done", "-update")):
            self._kernel(found, line)

    def _loop(self, found: Estimate, line: Instruction) -> None:
        if line.rounds is not None:
            course = Rounds(float(line.rounds))
        else:
            seen = list(_rows(line))
            rows = next((one for one in seen if one in self.assumed.loops), (*seen, None)[0])
            course = (
                self.assumed.loops.get(rows, self.assumed.other) if rows else self.assumed.other
            )
            found.loops[rows] = course.rounds
            # The host asks before every round, and once more to end.
            found.parts[HOST] += (course.rounds + 1) * self.speeds.host_wait
        for name in line.called:
            found.add(self.run(name, course.shares), course.rounds)

    def _kernel(self, found: Estimate, line: Instruction) -> None:
        work, speeds = work_of(self.module, line), self.speeds
        spent = {
            PRODUCTS: sum(flops / speeds.peak(dtype) for dtype, flops in work.products.items()),
            ARITHMETIC: work.other / speeds.other,
        }
        passes = speeds.sort_passes(work.sorted)
        arithmetic, memory = sum(spent.values()), passes * work.bytes / speeds.bandwidth
        bound = max(spent, key=spent.__getitem__) if arithmetic > memory else MEMORY
        found.parts[bound] += max(arithmetic, memory)
        found.parts[LAUNCHES] += passes * speeds.launch
        for dtype, flops in work.products.items():
            found.products[dtype] += flops
        flops = sum(work.products.values()) + work.other
        seconds = max(arithmetic, memory) + passes * speeds.launch
        found.kinds[kind_of(line, work)].add(
            Kind(float(passes), seconds, flops, passes * work.bytes), 1.0
        )

    def _sent(self, found: Estimate, line: Instruction) -> float:
        """Seconds that a collective takes its link; they are noted by kind, hidden or not."""
        size = float(sum(map(bytes_of, self.module.operand_types(line))))
        group = group_of(line.line)
        seconds = collective_seconds(line.kind_sent, size, group, self.speeds)
        found.kinds[line.kind_sent].add(Kind(1.0, seconds, 0.0, size), 1.0)
        return seconds


def _wait(found: Estimate, until: float) -> None:
    found.parts[COLLECTIVES] += max(until - found.seconds, 0.0)


def _rows(line: Instruction) -> Iterator[tuple[int, int]]:
    """What may be the rows of a loop: `[N, L]` of tokens whose lengths `[N]` are carried, too.

    Rows of several towers, `[towers, N, L]`, are sliced before their loop.
    """
    carried = arrays(line.type)
    for dtype, shape in carried:
        if dtype == "s32" and len(shape) == 2 and ("s32", shape[:1]) in carried:
            yield shape[0], shape[1]


def collective_seconds(kind: str, size: float, group: tuple[int, ...], speeds: Speeds) -> float:
    """Seconds of a collective whose every device gives `size` bytes.

    A ring sends (n-1)/n of the whole array once, for an all-reduce twice. A group that reaches over
    hosts has a ring for each of its devices in a host, through that device's own network card
    (NCCL's rings by NIC), so it goes as fast as these cards together, but no faster than inside.
    """
    count, links = len(group), speeds.links
    if count < 2 or links is None:
        return 0.0
    rounds = {
        "all-gather": count - 1.0,  # of parts
        "all-reduce": 2 * (count - 1) / count,
        "collective-permute": 1.0,
        "collective-broadcast": 1.0,
    }.get(kind, (count - 1) / count)
    in_host = Counter(device // links.host for device in group)
    if len(in_host) > 1:
        speed = min(links.inside, min(in_host.values()) * links.between)
        return links.between_latency + rounds * size / speed
    return links.inside_latency + rounds * size / links.inside


def group_of(line: str) -> tuple[int, ...]:
    """The devices of the first group of a collective; (): the text names none.

    XLA lists them, `{{0,1},{2,3}}`, or numbers them, `[groups,size]<=[…]T(…)`.
    """
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(map(int, found[1].split(",")))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        sizes = [int(size) for size in found[3].split(",")]
        order = [int(axis) for axis in found[4].split(",")] if found[4] else range(len(sizes))
        return tuple(_numbered(sizes, list(order), place) for place in range(int(found[2])))
    if found := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return int(found[1]), int(found[2])
    return ()


def _numbered(sizes: list[int], order: list[int], place: int) -> int:
    """The element at a place of `arange(sizes)` when its axes stand in this order."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    number = 0
    for axis in reversed(order):
        place, at = divmod(place, sizes[axis])
        number += at * strides[axis]
    return number


def kind_of(line: Instruction, work: Work) -> str:
    """What an instruction is, for people; alike ones have one kind."""
    if line.is_attention:
        return f"fused attention{', gradient' if 'Backward' in line.line else ''}"
    if work.products:
        dtype, shape = arrays(line.type)[0]
        factors = " and ".join(sorted(work.products))
        return f"product of {factors} to {dtype}{list(shape)}"
    if line.op == "fusion":
        return re.sub(r"(?:[._](?:\d+|clone|remat\d*))+$", "", line.name)
    return line.op

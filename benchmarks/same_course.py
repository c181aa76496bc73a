"""Proves of a compiled program that no device waits for another one that never comes.

A collective in a loop or a branch is safe if all devices that take part in it run the loop equally
often and choose the same branch. The proof is a walk over the program's HLO. Every value gets a
label for each device; devices with the same label hold the same value:

- A constant is the same everywhere, and so is an input that is not split. A split input differs
  as the annotation `sharding={…}` of its parameter says, and `partition-id` differs everywhere.
- The result of an operation is the same on devices on which all operands are.
- A gathered or summed value is the same on all devices of a group, and on two groups whose members
  hold the same values in the same order.
- What a loop or a branch gives differs, besides, where its condition does.

Two things are taken for granted: the same operation on the same values gives the same result on
every device, and whoever calls the program gives unsplit inputs as equals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from qrag_jax.runtime.hlo import Instruction, instructions
from tests.support.hlo import calls_host

EQUAL = 0  # the partition in which all devices have the same label

# A partition's number, or such values of the parts of a tuple.
Value = Any

_GATHERS = ("all-gather", "all-reduce", "collective-broadcast")
_BY_CHANNEL = ("all-to-all", "ragged-all-to-all", "collective-broadcast")
_OWN = ("partition-id", "replica-id", "rng", "rng-get-and-update-state", "infeed", "recv")
# Give on what they were given: the halves of asynchronous pairs, and marks for the compiler.
_PASSES = ("opt-barrier", "domain", "add-dependency")
_RUNS = ("call", "fusion", "async-start")
_INDEX = re.compile(r"\bindex=(\d+)")
_SHARDING = re.compile(r"\bsharding=\{(.*?)\}(?:, [a-z_]+=|$)")
_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))(.*)")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"('[^']*')=(\d+)")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def different_courses(text: str) -> list[str]:
    """Names of the collectives that a device may reach without all others of their group.

    Args:
        text: HLO of a compiled program, partitioned over devices (`compiled.as_text()`).

    Raises:
        ValueError: the program has replicas, which no program of `jax.jit` has.
    """
    header = text.splitlines()[0]
    if int((re.findall(r"replica_count=(\d+)", header) or [1])[0]) > 1:
        raise ValueError("programs with replicas are not understood")
    devices = int((re.findall(r"num_partitions=(\d+)", header) or [1])[0])
    if devices == 1:
        return []
    return _Walk(text, devices).found()


class _Partitions:
    """Partitions of the devices into those with the same value, by number; `EQUAL` is one part."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.labels: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._joined: dict[tuple[int, int], int] = {}
        self.of([0] * devices)
        self.own = self.of(range(devices))

    def of(self, labels: Sequence[Any]) -> int:
        """The number of the partition in which devices of the same label are together."""
        seen: dict[Any, int] = {}
        plain = tuple(seen.setdefault(label, len(seen)) for label in labels)
        if plain not in self._numbers:
            self._numbers[plain] = len(self.labels)
            self.labels.append(plain)
        return self._numbers[plain]

    def join(self, *numbers: int) -> int:
        """Devices are together if they are so in all of these."""
        result = EQUAL
        for number in numbers:
            if EQUAL in (result, number):
                result = max(result, number)
            elif result != number:
                pair = (result, number)
                if pair not in self._joined:
                    self._joined[pair] = self.of(list(zip(*(self.labels[n] for n in pair))))
                result = self._joined[pair]
        return result

    def flat(self, value: Value) -> int:
        """One partition for all parts of a tuple."""
        return self.join(*map(self.flat, value)) if isinstance(value, tuple) else value

    def refined(self, value: Value, other: Value) -> Value:
        """Part by part the join of two values."""
        both = isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other)
        if both:
            return tuple(self.refined(*parts) for parts in zip(value, other))
        if isinstance(value, tuple) and not isinstance(other, tuple):
            return tuple(self.refined(part, other) for part in value)
        return self.join(self.flat(value), self.flat(other))


class _Walk:
    def __init__(self, text: str, devices: int) -> None:
        self._partitions = _Partitions(devices)
        self._lines: dict[str, list[Instruction]] = {}
        for line in instructions(text):
            self._lines.setdefault(line.computation, []).append(line)
        entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
        assert entry is not None
        self._entry = entry[1]
        self._known: dict[Any, Value] = {}
        self._found: dict[str, None] = {}  # in the order in which they were found

    def found(self) -> list[str]:
        self._run(self._entry, (), EQUAL)
        return list(self._found)

    def _run(self, computation: str, given: tuple[Value, ...], course: int) -> Value:
        """The value of a computation's result; `course`: which devices come here together."""
        key = computation, given, course
        if key not in self._known:
            values: dict[str, Value] = {}
            result: Value = EQUAL
            for line in self._lines.get(computation, ()):
                operands = tuple(values.get(name, self._partitions.own) for name in line.operands)
                values[line.name] = self._value(line, operands, given, course)
                if line.is_root:
                    result = values[line.name]
            self._known[key] = result
        return self._known[key]

    def _value(
        self, line: Instruction, operands: tuple[Value, ...], given: tuple[Value, ...], course: int
    ) -> Value:
        partitions = self._partitions
        match line.op:
            case "parameter":
                number = int(line.line.split(" parameter(")[1].split(")")[0])
                return self._of_input(line) if line.computation == self._entry else given[number]
            case "tuple":
                return operands
            case "get-tuple-element":
                found = _INDEX.search(line.line)
                assert found is not None
                whole = operands[0]
                return whole[int(found[1])] if isinstance(whole, tuple) else whole
            case "while":
                return self._loop(line, operands[0], course)
            case "conditional":
                return self._branches(line, operands, course)
            case op if op in _OWN or calls_host(line.line):
                return partitions.own
            case op if op in _RUNS and line.called:
                # Nothing is sent inside a fusion, so it is looked at once for all courses.
                inside = EQUAL if op == "fusion" else course
                return self._run(line.called[0], operands, inside)
            case op if op in _PASSES or op.endswith(("-done", "-update")):
                return operands[0]
        if line.kind_sent:
            self._check(line, course)
            sent = tuple(self._sent(line, partitions.flat(operand)) for operand in operands)
            return sent if len(sent) > 1 else sent[0]
        return partitions.join(*map(partitions.flat, operands))

    def _loop(self, line: Instruction, state: Value, course: int) -> Value:
        condition, body = _part(line, "condition"), _part(line, "body")
        kept = self._kept(body)
        while True:
            # The number of rounds is a constant if the compiler knows it.
            differs = EQUAL
            if line.rounds is None:
                differs = self._partitions.flat(self._run(condition, (state,), course))
            inside = self._partitions.join(course, differs)
            self._run(condition, (state,), inside)
            after = self._run(body, (state,), inside)
            result = self._partitions.refined(state, after)
            if isinstance(result, tuple):
                result = tuple(
                    part if number in kept else self._partitions.refined(part, differs)
                    for number, part in enumerate(result)
                )
            else:
                result = self._partitions.join(result, differs)
            if result == state:
                return state
            state = result

    def _kept(self, body: str) -> set[int]:
        """The parts of a loop's state that a round only gives on."""
        lines = {line.name: line for line in self._lines[body]}
        root = next(line for line in lines.values() if line.is_root)
        parameters = {line.name for line in lines.values() if line.op == "parameter"}
        kept = set()
        for number, name in enumerate(root.operands if root.op == "tuple" else ()):
            source = lines.get(name)
            if source is not None and source.op == "get-tuple-element":
                index = _INDEX.search(source.line)
                assert index is not None
                if source.operands[0] in parameters and int(index[1]) == number:
                    kept.add(number)
        return kept

    def _branches(self, line: Instruction, operands: tuple[Value, ...], course: int) -> Value:
        differs = self._partitions.flat(operands[0])
        inside = self._partitions.join(course, differs)
        results = [
            self._run(name, (operand,), inside)
            for name, operand in zip(line.called, operands[1:], strict=True)
        ]
        value = results[0]
        for result in results[1:]:
            value = self._partitions.refined(value, result)
        return self._partitions.refined(value, differs)

    def _check(self, line: Instruction, course: int) -> None:
        labels = self._partitions.labels[course]
        # A permutation's devices wait for one another in pairs, and its kernel for all of them.
        groups = self._groups(line) or [list(range(self._partitions.devices))]
        if any(len({labels[device] for device in group}) > 1 for group in groups):
            self._found[line.name] = None

    def _sent(self, line: Instruction, number: int) -> int:
        """What devices hold after a collective of values that differ as in this partition."""
        labels = self._partitions.labels[number]
        if line.kind_sent == "collective-permute":
            found = _PAIRS.search(line.line)
            if found is None:
                return self._partitions.own
            pairs = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", found[1])]
            source = {target: labels[giver] for giver, target in pairs}
            return self._partitions.of([source.get(d, -1) for d in range(len(labels))])
        after: list[Any] = list(range(len(labels)))  # devices in no group that is understood
        for group in self._groups(line):
            together = tuple(labels[device] for device in group)
            for place, device in enumerate(group):
                gives_all = line.kind_sent in _GATHERS
                after[device] = (together, 0 if gives_all else place)
        return self._partitions.of(after)

    def _groups(self, line: Instruction) -> list[list[int]]:
        """The devices of each group; none if the text is not understood."""
        if line.kind_sent in _BY_CHANNEL:
            of_devices = "channel_id=" in line.line
        else:
            of_devices = "use_global_device_ids=true" in line.line
        if not of_devices:
            return []  # the numbers are those of replicas
        if found := _COUNTED.search(line.line):
            return _numbers(found[3], found[4]).reshape(int(found[1]), int(found[2])).tolist()
        if found := _LISTED.search(line.line):
            groups = [
                [int(device) for device in group.split(",") if device]
                for group in re.findall(r"\{([\d,]*)\}", found[1])
            ]
            return groups or [list(range(self._partitions.devices))]
        found = _AXES.search(line.line)
        return _along_axes(*found.groups()) if found else []

    def _of_input(self, line: Instruction) -> int:
        """How an input of the program differs between devices, from its annotation."""
        partitions, found = self._partitions, _SHARDING.search(line.line)
        if found is None:
            return partitions.own
        if found[1] == "replicated":
            return EQUAL
        tiles = _TILES.match(found[1])
        if tiles is None:
            return partitions.own
        shape = tuple(map(int, tiles[1].split(",")))
        if tiles[2]:
            devices = _numbers(tiles[2], tiles[3]).reshape(shape)
        else:
            devices = np.array([int(number) for number in tiles[4].split(",")]).reshape(shape)
        rest = tiles[5].strip()
        if rest == "last_tile_dim_replicate":
            copies = shape[-1]
        elif rest:
            return partitions.own
        else:
            copies = 1
        labels = np.empty(partitions.devices, int)
        labels[devices.reshape(-1)] = np.arange(devices.size) // copies
        return partitions.of(labels.tolist())


def _part(line: Instruction, name: str) -> str:
    found = re.search(rf"\b{name}=%?([\w.-]+)", line.line)
    assert found is not None
    return found[1]


def _along_axes(mesh: str, sizes: str | None, order: str | None, axes: str) -> list[list[int]]:
    """The groups along some axes of a mesh; none if these are parts of axes."""
    shape = {name: int(size) for name, size in _AXIS.findall(mesh)}
    along = axes.split(",")
    if not set(along) <= set(shape):
        return []
    counted = ",".join(map(str, shape.values()))
    devices = _numbers(sizes or counted, order).reshape(tuple(shape.values()))
    last = [place for place, name in enumerate(shape) if name in along]
    behind = range(-len(last), 0)
    members = int(np.prod([shape[name] for name in along]))
    return np.moveaxis(devices, last, list(behind)).reshape(-1, members).tolist()


def _numbers(sizes: str, order: str | None) -> np.ndarray:
    """The devices in the order `<=[sizes]T(order)`: counted, and their axes transposed."""
    shape = [int(size) for size in sizes.split(",")]
    counted = np.arange(int(np.prod(shape))).reshape(shape)
    return counted.transpose([int(axis) for axis in order.split(",")]) if order else counted

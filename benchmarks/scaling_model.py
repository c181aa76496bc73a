"""Predicts the step of a training on a cluster, from what one device computes and what it sends.

A step is what a device computes, then what its program waits for within its host, then the sum of
gradients between devices or hosts, then what is asked of a language model. The host makes the next
batch meanwhile, so it counts only where it takes longer. Collectives take what
`step_time.collective_seconds` says, as in every estimate of this package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.scaling_answers import Sidecar
from qrag_jax.errors import InputError
from qrag_jax.runtime.device_speeds import Links, Speeds
from qrag_jax.runtime.step_time import collective_seconds

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DATA, FSDP = "data parallel", "FSDP"
COMPUTE, INSIDE, BETWEEN = "compute", "collectives in a host", "collectives between hosts"
INPUT, ROLLOUTS, SIDECAR = "input", "rollouts", "sidecar"
PARTS = (COMPUTE, INSIDE, BETWEEN, INPUT, ROLLOUTS, SIDECAR)
PAYS = 0.5  # of the perfect speed-up, at least
DOLLARS_AN_HOUR = 3.0  # of one H100, an assumption; clouds ask 2 to 10 (docs/scaling.md)


@dataclasses.dataclass(frozen=True)
class Network:
    """What joins the hosts.

    Attributes:
        title: its name.
        each: bytes/s of each device to other hosts, in one direction.
        latency: seconds until a collective between hosts begins; an assumption.
        source: who says so.
    """

    title: str
    each: float
    latency: float
    source: str

    def of(self, speeds: Speeds) -> Speeds:
        """The same devices, joined by this network.

        Raises:
            InputError: a device has no links.
        """
        if speeds.links is None:
            raise InputError(
                f"{speeds.title} has no links to other devices; give a device with links, such as "
                "the H100."
            )
        links = dataclasses.replace(speeds.links, between=self.each, between_latency=self.latency)
        return dataclasses.replace(speeds, links=links)


INFINIBAND = Network(
    "InfiniBand NDR, 400 Gb/s for each GPU",
    50e9,
    30e-6,
    "NVIDIA DGX H100 data sheet: 8 ConnectX-7 of 400 Gb/s for 8 GPUs",
)
ETHERNET = Network(
    "Ethernet, 100 Gb/s for each host of 8",
    100e9 / 8 / 8,
    60e-6,
    "IEEE 802.3ba, 100 Gb/s, shared by 8 GPUs; the latency is assumed",
)
NETWORKS = (INFINIBAND, ETHERNET)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of a device while a step runs, from the compiler's buffer assignment.

    Attributes:
        arguments: parameters, targets, moments and the batch.
        outputs: results that reuse no argument.
        temporaries: all else.
    """

    arguments: float
    outputs: float
    temporaries: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.arguments + self.outputs + self.temporaries


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One program of a step, as compiled for a mesh of one host.

    Attributes:
        devices: of the mesh.
        compute: questions a device → seconds of all but collectives.
        exposed: questions a device → seconds in which the device waits for collectives.
        bytes: of each device.
    """

    devices: int
    compute: Mapping[int, float]
    exposed: Mapping[int, float]
    bytes: Bytes


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training whose step is predicted.

    Attributes:
        name: of the recipe.
        steps, questions: optimizer steps, and questions in each.
        gradients: bytes of the gradients of all trained parameters, in float32.
        question_bytes: bytes of a question on the device.
        loaded: questions/s that a host makes ready, with one core.
        one: the step on one device.
        split: the step on `split.devices` devices of one host, along `fsdp`; None: there is none.
        played: seconds of a program that plays before the update, by questions a device; none
            where the update plays itself.
        sidecar: the language model beside the training; None: none is asked.
    """

    name: str
    steps: int
    questions: int
    gradients: float
    question_bytes: float
    loaded: float
    one: Compiled
    split: Compiled | None = None
    played: Mapping[int, float] = dataclasses.field(default_factory=dict)
    sidecar: Sidecar | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A predicted step.

    Attributes:
        devices, questions: of the step; questions of all devices together.
        parts: seconds by `PARTS`.
    """

    devices: int
    questions: int
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the step: the device's parts, or the host's input if that takes longer."""
        return max(self._device, self.parts[INPUT])

    @property
    def _device(self) -> float:
        return sum(seconds for name, seconds in self.parts.items() if name != INPUT)

    @property
    def rate(self) -> float:
        """Questions/s."""
        return self.questions / self.seconds

    @property
    def bound(self) -> str:
        """The part that takes most."""
        if self.parts[INPUT] > self._device:
            return INPUT
        return max((n for n in PARTS if n != INPUT), key=lambda name: self.parts[name])


def check_devices(devices: int, host: int) -> None:
    """Refuses a number of devices that no hosts have.

    Raises:
        InputError: it is below 1, or neither less than a host has nor a multiple of it.
    """
    if devices < 1 or (devices > host and devices % host):
        raise InputError(
            f"{devices} devices do not fill hosts of {host}; give 1 to {host}, or a multiple of "
            f"{host}."
        )


def predict(recipe: Recipe, devices: int, each: int, how: str, speeds: Speeds) -> Step:
    """The step of so many devices with `each` questions on every device.

    Args:
        how: `DATA`: every device has all parameters; `FSDP`: the devices of a host share them, and
            hosts are data parallel.
        speeds: of a device and its links.

    Raises:
        InputError: there are no hosts of that size, or no program was compiled for it.
    """
    assert speeds.links is not None  # a network has been chosen
    host = speeds.links.host
    check_devices(devices, host)
    program = recipe.one if how == DATA else recipe.split
    if program is None or (how == FSDP and devices % program.devices):
        raise InputError(
            f"{recipe.name} has no program for FSDP on {devices} devices; give a multiple of the "
            "devices of the one that was compiled, or data parallel."
        )
    if each not in program.compute:
        raise InputError(
            f"{recipe.name} was not estimated for {each} questions a device; give one of "
            f"{', '.join(map(str, sorted(program.compute)))}."
        )
    parts = dict.fromkeys(PARTS, 0.0)
    parts[COMPUTE], parts[INSIDE] = program.compute[each], program.exposed[each]
    stride = program.devices
    group = tuple(range(0, devices, stride))
    where = BETWEEN if devices > host else INSIDE
    parts[where] += collective_seconds("all-reduce", recipe.gradients / stride, group, speeds)
    in_host = min(devices, host)
    parts[INPUT] = each * in_host / recipe.loaded
    parts[ROLLOUTS] = recipe.played.get(each, 0.0)
    if recipe.sidecar is not None:
        parts[SIDECAR] = recipe.sidecar.seconds(each * in_host, speeds)
    return Step(devices, each * devices, parts)


def weak(recipe: Recipe, how: str, speeds: Speeds, sizes: Sequence[int] = SIZES) -> list[Step]:
    """Steps with the recipe's batch on every device, for the sizes that `how` can have."""
    return [
        predict(recipe, size, recipe.questions, how, speeds)
        for size in _possible(recipe, how, sizes)
    ]


def strong(recipe: Recipe, how: str, speeds: Speeds, sizes: Sequence[int] = SIZES) -> list[Step]:
    """Steps with the recipe's batch over all devices; a device has a question at least.

    Where the batch does not split, the devices have as many questions as the fullest one would,
    and the step counts the recipe's own.
    """
    steps = []
    for size in _possible(recipe, how, sizes):
        if size <= recipe.questions:
            step = predict(recipe, size, -(-recipe.questions // size), how, speeds)
            steps.append(dataclasses.replace(step, questions=recipe.questions))
    return steps


def _possible(recipe: Recipe, how: str, sizes: Sequence[int]) -> list[int]:
    if how == DATA:
        return list(sizes)
    least = recipe.split.devices if recipe.split else 0
    return [size for size in sizes if least and size % least == 0]


def efficiencies(steps: Sequence[Step], first: Step) -> list[float]:
    """Questions/s of each device relative to those of the first step's devices."""
    return [step.rate / step.devices / (first.rate / first.devices) for step in steps]


def last_that_pays(steps: Sequence[Step], first: Step) -> Step | None:
    """The largest step up to which every one has `PAYS` of the first one's efficiency."""
    paying = None
    for step, share in zip(steps, efficiencies(steps, first), strict=True):
        if share < PAYS:
            break
        paying = step
    return paying


def split_bytes(one: Bytes, several: Bytes, devices: int, wanted: int) -> Bytes:
    """Bytes of a device when `wanted` devices share what two compiled programs tell.

    Each part is a + b / n: what every device has, and what is split over n. The programs for one
    device and for `devices` tell both numbers.

    Raises:
        InputError: the second program is for one device, too.
    """
    if devices < 2 or wanted < 1:
        raise InputError(
            f"bytes of {wanted} devices cannot be told from programs for 1 and {devices}; give one "
            "for 2 devices or more."
        )

    def part(alone: float, shared: float) -> float:
        split = (alone - shared) / (1 - 1 / devices)
        return max(alone - split * (1 - 1 / wanted), 0.0)

    return Bytes(
        part(one.arguments, several.arguments),
        part(one.outputs, several.outputs),
        part(one.temporaries, several.temporaries),
    )


def machine_links(devices: int, speed: float, latency: float) -> Links:
    """Links of processes that reach each other all alike, as on one machine."""
    return Links(max(devices, 1), speed, speed, latency, latency)


def shared(speeds: Speeds, processes: int, cores: int) -> Speeds:
    """What each of several processes has of a machine that one process can fill.

    Products, arithmetic and memory are shared by all. The start of a kernel takes one core, so it
    takes longer only where there are more processes than cores.

    Raises:
        InputError: there is no process or no core.
    """
    if processes < 1 or cores < 1:
        raise InputError(f"{processes} processes on {cores} cores cannot run; give 1 or more.")
    return dataclasses.replace(
        speeds,
        title=f"{speeds.title}, shared by {processes}",
        products={dtype: peak / processes for dtype, peak in speeds.products.items()},
        other=speeds.other / processes,
        bandwidth=speeds.bandwidth / processes,
        launch=speeds.launch * max(processes / cores, 1.0),
    )


def training_hours(step: Step, steps: int) -> float:
    """Hours of a training of so many steps, evaluations left out."""
    return steps * step.seconds / 3600


def dollars(step: Step, steps: int, an_hour: float = DOLLARS_AN_HOUR) -> float:
    """What a training costs at a price of a device's hour; other devices of a sidecar besides."""
    return training_hours(step, steps) * step.devices * an_hour

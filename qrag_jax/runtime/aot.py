"""What programs need before they run: devices that are not here, memory, FLOPs of products."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from qrag_jax.errors import InputError

# ---------------------------------------------------------------------- described devices

CUDA, TPU = "cuda", "tpu"
_GPUS_OF_HOST = 8
# TPUs of these kinds stand in a rectangle, of which a host has 2 × 2, or a single one.
_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_RECTANGLES = dict(zip((1, 4, 8, 16, 32, 64, 128, 256), _SHAPES, strict=True))
# XLA compiles for a GPU from its description alone (jax-ml/jax, tests/deviceless_aot_test.py), and
# for a TPU from the name of its kind. That needs the CUDA packages of this version of jax
# (`make gpu`) or its libtpu (`make tpu`), and neither a device nor a driver.
# libtpu asks the cloud's machine what it is, and complains of each answer that it does not get.
_NO_CLOUD = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # as no TPU is used, processes may compile side by side
}


class Target(NamedTuple):
    """A kind of device."""

    title: str  # for people
    memory: int  # bytes of one device
    # Facts for XLA: of a GPU a text of its protocol buffer GpuTargetConfigProto, of a TPU the name
    # of its kind.
    description: str
    platform: str = CUDA


# As NVIDIA and openxla/xla (xla/backends/gpu/target_config/specs) give them.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" pcie_bandwidth: 34359738368
  name: "NVIDIA H100 80GB HBM3" driver_version: "13.0.0" runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
TARGETS = {
    "h100": Target("NVIDIA H100 80GB", 84_942_979_072, _H100),
    "v5e": Target("Google TPU v5e", 16 * 2**30, "v5e", TPU),
    "v6e": Target("Google TPU v6e", 32 * 2**30, "v6e", TPU),
}


class Devices(NamedTuple):
    """Devices that are described, not present."""

    target: Target
    devices: list[jax.Device]


def described_devices(name: str) -> Devices:
    """The devices of a name such as "h100", "h100x8" or "v5ex4".

    GPUs are on hosts of 8. It must be called before JAX has looked for devices; this process then
    computes on the CPU.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:x([1-9]\d*))?", name)
    if match is None or match[1] not in TARGETS:
        raise InputError(
            f"--for is {name!r}; give the kind of device, with their number if there are several, "
            f"such as h100x8 (known: {', '.join(TARGETS)})."
        )
    target, count = TARGETS[match[1]], int(match[2] or 1)
    topology: dict[str, Any]
    if target.platform == TPU:
        if count not in _RECTANGLES:
            raise InputError(
                f"--for is {name!r}, but such TPUs stand in rectangles; give one of "
                f"{', '.join(map(str, _RECTANGLES))}."
            )
        topology = {"topology_name": f"{target.description}:{_RECTANGLES[count]}"}
        topology |= {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
    else:
        hosts, rest = divmod(count, _GPUS_OF_HOST)
        if hosts and rest:
            raise InputError(
                f"--for is {name!r}, but hosts have {_GPUS_OF_HOST} GPUs; give fewer than that or "
                "a multiple of it."
            )
        shape = f"1x{hosts}x{_GPUS_OF_HOST}" if hosts else f"1x1x{rest}"
        topology = {"target_config": target.description, "topology": shape}
    # Else the plugin looks for a device and its driver, and is not there at all without them.
    jax.config.update("jax_platforms", "cpu")
    if target.platform == TPU:
        for variable, value in _NO_CLOUD.items():
            os.environ.setdefault(variable, value)
    extra = "tpu" if target.platform == TPU else "cuda12"
    try:
        found = topologies.get_topology_desc(platform=target.platform, **topology)
    except (RuntimeError, NotImplementedError, ImportError) as error:
        raise InputError(
            f"to compile for {name} the packages of jax[{extra}] are needed, of this jax's version "
            f"({' '.join(str(error).split())[:200]}); run pip install 'qrag_jax[{extra}]'."
        ) from None
    return Devices(target, list(found.devices))


# ---------------------------------------------------------------------- memory

_ENCODER = (
    "a lower --config.encoder.block_tokens, --config.encoder.remat=layers, {}, "
    "--config.encoder.lora.rank above 0"
)
_MODEL = (
    "a lower --config.model.block_tokens, --config.model.remat=layers, a lower "
    "--config.sampling.rows, a lower --config.sampling.room, {}, --config.model.lora.rank above 0"
)
# config.system → what needs less, the cheapest first; the first of them change no result.
_SAVING = {
    "q_rag": _ENCODER.format(
        "a higher --config.train.accumulation, a lower --config.eval.batch_size, a lower "
        "--config.train.batch_size"
    ),
    "harr": _ENCODER.format("a lower --config.state.max_tokens, a lower --config.train.batch_size"),
    "rlvr": _MODEL.format("a lower --config.tools.turn_tokens"),
    "leret": _MODEL.format(
        "a lower --config.preference.batch_size, a lower --config.sft.batch_size"
    ),
    "deepretrieval": _MODEL.format("a lower --config.train.batch_size"),
}


def saving(system: str | None) -> str:
    """What needs less memory, as the beginning of a sentence: "…, … or … needs less".

    Args:
        system: field `system` of the config; None: the command has no config.
    """
    if system not in _SAVING:
        return "a smaller model or more devices needs less"
    return f"{_SAVING[system]} or more devices along fsdp (--config.runtime.mesh) needs less"


def shortage(error: Exception, system: str | None = None) -> str | None:
    """One sentence if a program did not fit into a device's memory, None for another error.

    XLA's error has no class of its own: its message begins with the name of the status, be it of
    compiling or of running. JAX puts words before it where a host's array is copied.
    """
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in text:
        return None
    asked = re.search(r"allocat\w+ (?:of )?(\d+) ?bytes", text)
    size = f" ({shown(int(asked[1]))} more were asked for)" if asked else ""
    return f"the memory of the devices is not enough{size}; {saving(system)}."


def room(device: jax.Device, sharing: int = 1) -> int | None:
    """The bytes of a device that are free; None if the platform does not say.

    Args:
        sharing: number of devices that share a host's memory, where devices are processors.
    """
    if device.platform == "cpu":
        meminfo = Path("/proc/meminfo")
        text = meminfo.read_text() if meminfo.exists() else ""
        found = re.search(r"MemAvailable:\s+(\d+) kB", text)
        known = [int(found[1]) * 2**10] if found else []
        return min(known + cgroup_room()) // sharing if found else None
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """The bytes that this process's control groups leave it, as a container limits them."""
    rooms = []
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                with contextlib.suppress(OSError, ValueError):  # "max"; or there is no limit
                    most, used = (int((folder / name).read_text()) for name in names)
                    # Files that were read are dropped from memory when it is needed.
                    stat = (folder / "memory.stat").read_text()
                    files = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
                    rooms.append(most - used + (int(files[1]) if files else 0))
    return rooms


def shown(count: int) -> str:
    """A number of bytes as text for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"


class FirstCalls:
    """Tells the memory of each program before its first call.

    The program is compiled for that, and the call takes the same compiled program: JAX keeps it
    with the jitted function, so nothing is compiled twice.

    Args:
        devices: those of the mesh that this process has.
        system: field `system` of the config.
        log: takes a line.
    """

    def __init__(
        self, devices: Sequence[jax.Device], system: str, log: Callable[[str], None]
    ) -> None:
        self._devices, self._system, self._log = devices, system, log
        self._seen = set[int]()

    def before(self, name: str, function: Any, arguments: Sequence[Any]) -> None:
        """Tells the memory of a jitted function called `name`, if this is its first call."""
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        needs = function.lower(*arguments).compile().memory_analysis()
        if needs is None:
            return  # this backend tells no bytes
        there = needs.argument_size_in_bytes
        more = needs.output_size_in_bytes - needs.alias_size_in_bytes + needs.temp_size_in_bytes
        line = (
            f"memory of the {name}: {shown(there + more)} per device, {shown(there)} of it there "
            f"already and {shown(more)} more"
        )
        if (free := room(self._devices[0], len(self._devices))) is not None:
            line += f"; {shown(free)} are free"
            if more > free:
                line += f", which is too little: {saving(self._system)}"
        self._log(line)


class PeakMemory:
    """The peak memory of this process since the object was made.

    On Linux the object resets the peak. Elsewhere the peak is that of the whole process so far.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def mebibytes(self) -> float:
        """The peak in MiB."""
        with contextlib.suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            if found:
                return int(found[1]) / 2**10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


# ---------------------------------------------------------------------- products
# FLOPs come from the shapes of a compiled program's text, so padding and what is computed twice
# count. Loops with a count are multiplied; of loops over blocks of rows (`models.compute.ragged`)
# the caller says how many rounds there are and which branch they take. XLA's own cost analysis
# takes every loop as one round.

TF32 = "tf32"
_GEMM = re.compile(r'custom_call_target="__cu(?:blas|dnn)\$[^"]*(?:gemm|matmul)', re.IGNORECASE)
_SCORES = re.compile(r'"intermediate_tensor_shape".*?"dimensions": ?\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type": ?"(?:PADDING_)?CAUSAL"')

# FLOP/s of products by the type of their factors: NVIDIA's data sheets of the H100 and H200 (SXM)
# and the A100 (80 GB, SXM), without sparsity.
_HOPPER = {"bf16": 989e12, "f16": 989e12, TF32: 495e12, "f32": 67e12}
_AMPERE = {"bf16": 312e12, "f16": 312e12, TF32: 156e12, "f32": 19.5e12}
PEAKS = {"h100": _HOPPER, "h200": _HOPPER, "a100": _AMPERE}
# What an H200 reached on 2026-11-27: 0.26 in HARR's updates, 0.27 in Q-RAG's, 0.38 in RLVR's.
# Times and prices take the lowest.
SHARE_OF_PEAK = 0.26


class Rounds(NamedTuple):
    """The course of a loop over blocks."""

    rounds: float = 1.0  # mean number
    shares: tuple[float, ...] = ()  # of the rounds, that take each branch; (): all alike


Loops = Mapping[tuple[int, int], Rounds]  # by the rows `[N, L]` that a loop carries


def least_seconds(device_kind: str, flops: Mapping[str, float]) -> float | None:
    """Seconds of so many FLOPs, by type, at the peak of a device; None: its peak is unknown.

    Args:
        device_kind: JAX's name of it, such as "NVIDIA H100 80GB HBM3". The slower cards of the
            same names, for PCIe, are unknown.
        flops: as `product_flops` counts them.
    """
    words = device_kind.lower().replace("-", " ").split()
    peaks = next((PEAKS[word] for word in words if word in PEAKS), None)
    if peaks is None or {"pcie", "nvl"} & set(words):
        return None
    return sum(count / peaks.get(dtype, peaks["f32"]) for dtype, count in flops.items())


def product_flops(text: str, loops: Loops | None = None) -> dict[str, float]:
    """FLOPs of one run's matrix products, by the type of their factors.

    That is "bf16", "f32" and so on; "tf32" are float32 factors that a GPU may round.

    Args:
        loops: the course of loops without a known count; others take one round, and all branches
            of one alike.
    """
    module, courses = Module.of(text), loops or {}

    def of(name: str, shares: tuple[float, ...]) -> Counter[str]:
        total: Counter[str] = Counter()

        def add(part: Mapping[str, float], times: float) -> None:
            for dtype, count in part.items():
                total[dtype] += times * count  # type: ignore[assignment]

        for line in module.computations.get(name, {}).values():
            if line.op == "while":
                course = next((courses[rows] for rows in rows_of(line) if rows in courses), None)
                rounds = line.rounds or (course.rounds if course else 1)
                for called in line.called:
                    add(of(called, course.shares if course else ()), rounds)
            elif line.op == "conditional":
                even = (1 / len(line.called),) * len(line.called)
                taken = shares if len(shares) == len(line.called) else even
                for share, called in zip(taken, line.called, strict=True):
                    add(of(called, ()), share)
            elif line.op in ("fusion", "call", "map") or line.op.endswith("-start"):
                for called in line.called:
                    add(of(called, shares), 1)
            else:
                add(_product(module, line), 1)
        return total

    return dict(of(module.entry, ()))


def rows_of(line: Instruction) -> list[tuple[int, int]]:
    """What may be the rows of a loop: tokens `s32[N, L]` whose lengths `s32[N]` it carries, too.

    Of one device's part `[data, fsdp, N, L]` the first two sizes are 1.
    """
    carried = arrays(line.type)
    return [
        (shape[-2], shape[-1])
        for dtype, shape in carried
        if dtype == "s32"
        and len(shape) > 1
        and math.prod(shape[:-2]) == 1
        and ("s32", shape[:-1]) in carried
    ]


def _product(module: Module, line: Instruction) -> dict[str, float]:
    """FLOPs of one instruction, if it is a product: XLA's own, cuBLAS's or cuDNN's attention."""
    if line.op == "custom-call" and ATTENTION.search(line.line):
        return _attention(line)
    taken = [arrays(text) for text in module.operand_types(line)]
    factor = (taken[0] if taken and taken[0] else arrays(line.type))[:1]
    if line.op == "dot" and taken[0]:
        inner = math.prod(taken[0][0][1][axis] for axis in line.sizes("lhs_contracting_dims"))
        return {_rounded(factor[0][0], line): 2.0 * elements(line.type) * inner}
    if line.op == "convolution" and taken[1]:
        labels, kernel = re.search(r"dim_labels=\w+_(\w+)->", line.line), taken[1][0][1]
        inner = math.prod(kernel) // kernel[labels[1].index("o")] if labels else 1
        return {_rounded(factor[0][0], line): 2.0 * elements(line.type) * inner}
    if line.op == "custom-call" and _GEMM.search(line.line):
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.line)
        if axes and taken[0]:
            inner = math.prod(taken[0][0][1][int(axis)] for axis in re.findall(r"\d+", axes[1]))
            result = arrays(line.type)[0]  # what follows it is room to work in
            return {_rounded(factor[0][0], line): 2.0 * math.prod(result[1]) * inner}
    return {}


def _attention(line: Instruction) -> dict[str, float]:
    """Fused attention: two products forward, five backward, of scores `[B, H, Q, K]` and width d.

    Padded rows count in full, as if the kernel computed them. A causal mask halves the scores (Dao
    et al., arXiv 2205.14135, count alike).
    """
    sizes = _SCORES.search(line.line)
    dtype, first = arrays(line.type)[0]
    if sizes:
        scores = math.prod(map(int, re.findall(r"\d+", sizes[1])))
    else:  # the result is [B, H, Q, d], and a row attends to itself
        scores = math.prod(first[:3]) * first[2]
    flops = 2.0 * (5 if "Backward" in line.line else 2) * scores * first[-1]
    return {dtype: flops / 2 if _CAUSAL.search(line.line) else flops}


def _rounded(dtype: str, line: Instruction) -> str:
    """XLA lets a GPU round float32 factors to TF32 unless the program asks for the highest."""
    exact = "highest" in line.line or '"HIGHEST"' in line.line
    return TF32 if dtype == "f32" and not exact else dtype


# ---------------------------------------------------------------------- text of programs

# A computation's head, `%name (…) -> … {` or `ENTRY %name …`.
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
# `%name = TYPE op(operands)…`; a TYPE may be a tuple with comments.
_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
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

"""What programs need before they run: devices that are not here, memory, FLOPs of products."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import reading

# ---------------------------------------------------------------------- described devices

CUDA, TPU = "cuda", "tpu"
_GPUS_OF_HOST = 8
# TPUs of these kinds stand in a rectangle of some height, of which a host has 2 × 2, or one alone.
_HEIGHTS = {1: 1, 4: 2, 8: 2, 16: 4, 32: 4, 64: 8, 128: 8, 256: 16}
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
    "h100": Target(84_942_979_072, _H100),
    "v5e": Target(16 * 2**30, "v5e", TPU),
    "v6e": Target(32 * 2**30, "v6e", TPU),
}


def described_devices(name: str) -> tuple[Target, list[jax.Device]]:
    """The kind and the devices of a name such as "h100", "h100x8" or "v5ex4".

    GPUs are on hosts of 8. It must be called before JAX has looked for devices; this process then
    computes on the CPU.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:x([1-9]\d*))?", name)
    target = TARGETS.get(match[1]) if match else None
    count = int(match[2] or 1) if match else 0
    hosts, rest = divmod(count, _GPUS_OF_HOST)
    if target is None or (count not in _HEIGHTS if target.platform == TPU else hosts and rest):
        raise InputError(
            f"--for is {name!r}; give a device ({', '.join(TARGETS)}) and perhaps how many, as in "
            f"h100x8: GPUs up to 8 or a multiple, TPUs {', '.join(map(str, _HEIGHTS))}."
        )
    # Else the plugin looks for a device and its driver, and is not there at all without them.
    jax.config.update("jax_platforms", "cpu")
    topology: dict[str, Any]
    if target.platform == TPU:
        extra, shape = "tpu", f"{_HEIGHTS[count]}x{count // _HEIGHTS[count]}"
        topology = {"topology_name": f"{target.description}:{shape}"}
        topology |= {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
        for variable, value in _NO_CLOUD.items():
            os.environ.setdefault(variable, value)
    else:
        extra, shape = "cuda12", f"1x{hosts}x{_GPUS_OF_HOST}" if hosts else f"1x1x{rest}"
        topology = {"target_config": target.description, "topology": shape}
    fix = f"run pip install 'qrag_jax[{extra}]', for this jax's version"
    with reading(
        f"the description of {name}", fix, (RuntimeError, NotImplementedError, ImportError)
    ):
        description = topologies.get_topology_desc(platform=target.platform, **topology)
    return target, list(description.devices)


# ---------------------------------------------------------------------- memory

# The cheapest first: blocks and remat change no result.
SAVING = (
    "a lower config.encoder.block_tokens (or model.block_tokens), remat=layers as well, fewer "
    "questions at a time (train.batch_size, eval.batch_size, sampling.rows), adapters (lora.rank) "
    "or more devices along fsdp (runtime.mesh) need less"
)


def shortage(error: Exception) -> str | None:
    """One sentence if a program did not fit into a device's memory, None for another error.

    XLA's error has no class of its own: its message begins with the name of the status, be it of
    compiling or of running. JAX puts words before it where a host's array is copied.
    """
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in text:
        return None
    asked = re.search(r"allocat\w+ (?:of )?(\d+) ?bytes", text)
    size = f" ({shown(int(asked[1]))} more were asked for)" if asked else ""
    return f"the memory of the devices is not enough{size}; {SAVING}."


def room(device: jax.Device, sharing: int) -> int | None:
    """The bytes of a device that are free; None if the platform does not say.

    So many devices are `sharing` a host's memory, where devices are processors.
    """
    if device.platform == "cpu":
        kibibytes = int(_found(Path("/proc/meminfo"), r"MemAvailable:\s+(\d+) kB"))
        return min([kibibytes * 2**10, *_cgroup_room()]) // sharing
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def _cgroup_room() -> list[int]:
    """The bytes that this process's control groups (version 2) leave it, as of a container."""
    root, rooms = Path("/sys/fs/cgroup"), []
    group = root / _found(Path("/proc/self/cgroup"), "^0::/(.*)$")
    for folder in (group, *group.parents):
        if folder.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):  # "max"; or there is no limit
                most, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
                # Files that were read are dropped from memory when it is needed.
                files = _found(folder / "memory.stat", r"^inactive_file (\d+)$")
                rooms.append(most - used + int(files or 0))
    return rooms


def _found(path: Path, pattern: str) -> str:
    """The group of a pattern in a file; "": it is not there, or there is no such file."""
    with contextlib.suppress(OSError):
        if match := re.search(pattern, path.read_text(), re.MULTILINE):
            return match[1]
    return ""


def shown(count: int) -> str:
    """A number of bytes as text for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"


class Calls:
    """Calls jitted functions without transfers, and logs the memory of each before its first call.

    The program is compiled for that, and the call takes the same compiled program: JAX keeps it
    with the jitted function, so nothing is compiled twice.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._seen = log, set[int]()

    def __call__(self, name: str, function: Any, arguments: Sequence[Any]) -> Any:
        with jax.transfer_guard("disallow"):
            if id(function) not in self._seen:
                self._seen.add(id(function))
                _, needs = _memory(function.lower(*arguments).compile())
                self._log(f"memory of the {name}: {needs}")
            return function(*arguments)


def _memory(compiled: Any) -> tuple[int, str]:
    """The bytes that a program needs on each device, and a line about them."""
    stats = compiled.memory_analysis()
    there, temporary = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    new = stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = there + new + temporary
    return total, (
        f"{shown(total)} per device ({shown(there)} arguments, {shown(new)} new results, "
        f"{shown(temporary)} temporary)"
    )


class PeakMemory:
    """The peak memory of this process since the object was made."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # where that is forbidden, it is the peak so far
            Path("/proc/self/clear_refs").write_text("5")

    def mebibytes(self) -> float:
        return int(_found(Path("/proc/self/status"), r"VmHWM:\s+(\d+) kB")) / 2**10


# ---------------------------------------------------------------------- products

# FLOP/s of products by the type of their factors: NVIDIA's data sheets of the H100 and H200 (SXM)
# and the A100 (80 GB, SXM), without sparsity.
_HOPPER = {"bfloat16": 989e12, "float32": 67e12}
PEAKS = {"h100": _HOPPER, "h200": _HOPPER, "a100": {"bfloat16": 312e12, "float32": 19.5e12}}
# What an H200 reached on 2026-11-27: 0.26 in HARR's updates, 0.27 in Q-RAG's, 0.38 in RLVR's, with
# what is computed twice counted. Times and prices take the lowest.
SHARE_OF_PEAK = 0.26


def least_seconds(device_kind: str, flops: float, dtype: str) -> float | None:
    """Seconds of so many FLOPs at the peak of a device; None: its peak is unknown.

    Args:
        device_kind: JAX's name of it, such as "NVIDIA H100 80GB HBM3". The slower cards of the
            same names, for PCIe, are unknown.
        dtype: of the factors.
    """
    words = device_kind.lower().replace("-", " ").split()
    peaks = next((PEAKS[word] for word in words if word in PEAKS), None)
    if peaks is None or {"pcie", "nvl"} & set(words):
        return None
    return flops / peaks[dtype]


# ---------------------------------------------------------------------- dry runs

# Of a device's memory, for programs; the rest is for the runtime and the gaps between buffers.
MEMORY_SHARE = 0.92


class Program(NamedTuple):
    """A jitted function and the shapes that it is called with."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    # FLOPs of its matrix products on all devices together, by the model's sizes and the tokens;
    # and the type of their factors
    flops: float
    dtype: str


def program_lines(
    programs: Sequence[Program], devices: Sequence[jax.Device], target: Target | None
) -> Iterator[str]:
    """Compiles each program for these devices; says memory, FLOPs and, of known peaks, time.

    `target` is the kind of devices that are only described.
    """
    largest, kind = 0, devices[0].device_kind
    for program in programs:
        before = time.monotonic()
        total, needs = _memory(program.function.lower(*program.arguments).compile())
        largest = max(largest, total)
        yield f"  {program.name}: {needs}, compiled in {time.monotonic() - before:.1f} s"
        flops = program.flops / len(devices)
        least, time_of = least_seconds(kind, flops, program.dtype), ""
        if least is not None:
            milliseconds = 1e3 * least / SHARE_OF_PEAK
            time_of = f": {milliseconds:.3g} ms at {SHARE_OF_PEAK:.0%} of the peak"
        yield f"    products of {flops / 1e12:.3g} TFLOP per device{time_of}"
    yield f"{len(programs)} programs, each compiled once for {len(devices)} {kind} device(s)"
    if target is not None:
        yield fit(largest, target)


def fit(needed: int, target: Target) -> str:
    """One line: whether so many bytes fit into a device's memory; if not, what saves some."""
    free = int(MEMORY_SHARE * target.memory)
    of = f"of {shown(target.memory)}, {1 - MEMORY_SHARE:.0%} of which are kept free"
    if needed <= free:
        return f"fits: {shown(needed)} {of}"
    return f"does not fit: {shown(needed)} {of}, so {shown(needed - free)} too much; {SAVING}"

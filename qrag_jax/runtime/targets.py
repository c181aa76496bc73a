"""Devices that programs can be compiled for although this machine does not have them.

XLA compiles for a GPU from its description alone (jax-ml/jax, tests/deviceless_aot_test.py), and
for a TPU from the name of its kind. That needs the CUDA packages of this version of jax
(`make gpu`) or its libtpu (`make tpu`), and neither a device nor a driver.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from qrag_jax.errors import InputError

CUDA, TPU = "cuda", "tpu"
GPUS_OF_HOST = 8
# TPUs of these kinds stand in a rectangle, of which a host has 2 × 2, or a single one.
_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
RECTANGLES = dict(zip((1, 4, 8, 16, 32, 64, 128, 256), _SHAPES, strict=True))
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
        known = ", ".join(TARGETS)
        raise InputError(
            f"--for is {name!r}; give the kind of device, with their number if there are several, "
            f"such as h100x8 (known: {known})."
        )
    target, count = TARGETS[match[1]], int(match[2] or 1)
    topology = _tpus(name, target, count) if target.platform == TPU else _gpus(name, target, count)
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


def _gpus(name: str, target: Target, count: int) -> dict[str, Any]:
    hosts, rest = divmod(count, GPUS_OF_HOST)
    if hosts and rest:
        raise InputError(
            f"--for is {name!r}, but hosts have {GPUS_OF_HOST} GPUs; give fewer than that or a "
            "multiple of it."
        )
    shape = f"1x{hosts}x{GPUS_OF_HOST}" if hosts else f"1x1x{rest}"
    return {"target_config": target.description, "topology": shape}


def _tpus(name: str, target: Target, count: int) -> dict[str, Any]:
    if count not in RECTANGLES:
        *others, last = map(str, RECTANGLES)
        raise InputError(
            f"--for is {name!r}, but such TPUs stand in rectangles; give {', '.join(others)} or "
            f"{last} of them."
        )
    alone = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
    return {"topology_name": f"{target.description}:{RECTANGLES[count]}", **alone}

"""Devices that programs can be compiled for although this machine does not have them.

XLA compiles for a GPU from its description alone (jax-ml/jax, tests/deviceless_aot_test.py). That
needs the CUDA packages of this version of jax (`make gpu`), no GPU and no driver.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from qrag_jax.errors import InputError

PLUGIN = "jax-cuda12-plugin"
HELP = "`make gpu` makes an environment that has them"


class Target(NamedTuple):
    """A kind of device.

    title: its name for people.
    memory: bytes of one device.
    description: facts for XLA, a text of its protocol buffer GpuTargetConfigProto.
    """

    title: str
    memory: int
    description: str


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
TARGETS = {"h100": Target("NVIDIA H100 80GB", 84_942_979_072, _H100)}


class Devices(NamedTuple):
    """Devices that are described, not present."""

    target: Target
    devices: list[jax.Device]


def described_devices(name: str) -> Devices:
    """The devices of a name such as "h100" or "h100x8": one host with so many of them.

    It must be called before JAX has looked for devices; this process then computes on the CPU.

    Raises:
        InputError: the name is unknown, or the packages to compile for it are missing or do not
            belong to this version of jax.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:x([1-9]\d*))?", name)
    if match is None or match[1] not in TARGETS:
        known = ", ".join(TARGETS)
        raise InputError(
            f"--for is {name!r}; give the kind of device, with their number if there are several, "
            f"such as h100x8 (known: {known})."
        )
    _check_packages()
    # Else the plugin looks for a GPU and its driver, and is not there at all without them.
    jax.config.update("jax_platforms", "cpu")
    target, count = TARGETS[match[1]], int(match[2] or 1)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.description, topology=f"1x1x{count}"
    )
    return Devices(target, list(topology.devices))


def _check_packages() -> None:
    try:
        found = importlib.metadata.version(PLUGIN)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"to compile for a GPU the packages of jax[cuda12] are needed; {HELP}."
        ) from None
    if found != jax.__version__:
        raise InputError(
            f"{PLUGIN} is {found}, but jax is {jax.__version__}; they must be equal, and {HELP}."
        )

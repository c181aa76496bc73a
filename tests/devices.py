"""Eight devices where there is one processor: in these tests' processes, or in one of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
from jax.sharding import Mesh

from qrag_jax.runtime.mesh import make_mesh

COUNT = 8


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of the first devices, as many as these sizes need."""
    return make_mesh((data, fsdp, tensor), jax.devices()[: data * fsdp * tensor])


def environment_of(count: int) -> dict[str, str]:
    """This process's environment, for a child with so many devices of the CPU backend."""
    several = f"--xla_force_host_platform_device_count={count}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {several}".strip()
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run_two_processes(module: str, *arguments: str) -> None:
    """Runs `MODULE ARGUMENTS ADDRESS PROCESS` as two processes that share `COUNT` devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments, address, number],
            cwd=Path(__file__).parents[1],
            env=environment_of(COUNT // 2),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in "01"
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors[-5000:]
    finally:
        for process in processes:
            process.kill()

"""The environment of a process that has several devices where there is one processor."""

from __future__ import annotations

import os


def virtual_devices(count: int) -> dict[str, str]:
    """This process's own environment, with so many devices of the CPU backend."""
    several = f"--xla_force_host_platform_device_count={count}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {several}".strip()
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}

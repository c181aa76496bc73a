"""What a mesh is made of: the one place where code asks for the kind of its devices.

`jax.default_backend()` is not asked: a program may be compiled for devices that this process does
not have (`runtime.targets`).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

CPU, GPU, TPU = "cpu", "gpu", "tpu"
AMPERE = (8, 0)  # the first capability with bfloat16 and fused attention


class Platform(NamedTuple):
    """The devices of a mesh, which are all alike."""

    kind: str = CPU  # or "gpu", "tpu"
    capability: tuple[int, int] | None = None  # NVIDIA's, such as (9, 0)

    @classmethod
    def of(cls, mesh: Mesh) -> Platform:
        """The platform of a mesh."""
        return cls._of(mesh.devices.flat[0])

    @classmethod
    def here(cls) -> Platform:
        """The platform of this process's own devices."""
        return cls._of(jax.devices()[0])

    @classmethod
    def _of(cls, device: jax.Device) -> Platform:
        # AMD's GPUs name an architecture there, such as gfx942.
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        return cls(device.platform, (int(found[1]), int(found[2])) if found else None)

    @property
    def on_cpu(self) -> bool:
        """Whether this is a CPU."""
        return self.kind == CPU

    @property
    def has_bfloat16(self) -> bool:
        """Whether matrix products in bfloat16 are faster here than in float32.

        NVIDIA's GPUs have them since Ampere. On a CPU it depends on the processor: see
        `models.compute.precision`.
        """
        if self.on_cpu:
            return False
        return self.capability is None or self.capability >= AMPERE

    @property
    def has_fused_attention(self) -> bool:
        """Whether cuDNN's fused attention runs here."""
        return self.capability is not None and self.capability >= AMPERE


# XLA would compute x·W and an adapter's x·A as one product of [W, A], and then copy its two parts:
# for Qwen3-0.6B that is an eighth of an update's time, as estimated for H100s.
_PRODUCTS_APART = {"xla_gpu_dot_merger_threshold_mb": 0}


def compiler_options(mesh: Mesh, *, adapters: bool) -> dict[str, Any] | None:
    """What `jax.jit` takes as `compiler_options`.

    Args:
        adapters: the program computes low-rank adapters beside kernels, or other products of one
            factor that are faster apart.
    """
    return _PRODUCTS_APART if adapters and Platform.of(mesh).kind == GPU else None

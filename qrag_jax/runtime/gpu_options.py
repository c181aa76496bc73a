"""XLA's options for programs on NVIDIA's GPUs, where its own choice costs time."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from qrag_jax.runtime.platform import GPU, Platform

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

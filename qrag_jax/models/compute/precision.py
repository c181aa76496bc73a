"""The precision policy: the dtype of each part of the computation.

| what | dtype |
|---|---|
| stacked parameters, target parameters, optimizer state, gradients | float32 |
| factors of the encoders' matrix products | `products` |
| activations between them | `activations` |
| sums inside products, softmax, mean and variance of LayerNorms | float32 |
| embeddings, Q-values, log-sum-exp, λ-returns, losses, metrics | float32 |

`config.encoder.dtype` sets `products` and `activations` together. Products of float32 factors are
exact everywhere (`EXACT`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.errors import InputError
from qrag_jax.runtime.platform import Platform

AUTO, FLOAT32, BFLOAT16 = NAMES = ("auto", "float32", "bfloat16")
# Forms of attention: plain batched products, JAX's own (left to XLA), cuDNN's fused kernel.
PRODUCTS, LIBRARY, FUSED = ATTENTION = ("products", "library", "fused")
# Of products whose results are Q-values, embeddings or losses. By default a GPU rounds the factors
# of a float32 product to TF32, which keeps 10 bits of 23.
EXACT = jax.lax.Precision.HIGHEST


def exact(products: jnp.dtype) -> jax.lax.Precision | None:
    """The precision of a product of factors of this dtype: exact for float32, else the default."""
    return EXACT if products == jnp.float32 else None


class Precision(NamedTuple):
    """Dtypes of the encoders' computation (see the module), and the form of their attention.

    attention: a name of `ATTENTION`. The fused kernel takes half precision alone.
    """

    activations: jnp.dtype = jnp.dtype(jnp.float32)
    products: jnp.dtype = jnp.dtype(jnp.float32)
    attention: str = PRODUCTS


def precision(name: str, platform: Platform) -> Precision:
    """The dtypes that "float32", "bfloat16" or "auto" (bfloat16 if it is faster there) stand for.

    On CPU only the products use bfloat16: nothing else is faster in it there.

    Raises:
        InputError: the name is unknown, or the GPU has no bfloat16.
    """
    if name not in NAMES:
        raise InputError(f"config.encoder.dtype is {name!r}; use one of {', '.join(NAMES)}.")
    full, half = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
    if platform.on_cpu:
        in_half = name == BFLOAT16 or (name == AUTO and _has_matrix_unit())
        return Precision(full, half if in_half else full, PRODUCTS)
    if name == FLOAT32 or (name == AUTO and not platform.has_bfloat16):
        return Precision(full, full, LIBRARY)
    if not platform.has_bfloat16:
        raise InputError(
            f"config.encoder.dtype is {BFLOAT16}, which GPUs have from compute capability 8.0 on, "
            f"and this one has {platform.capability}; use {FLOAT32}."
        )
    return Precision(half, half, FUSED if platform.has_fused_attention else LIBRARY)


def _has_matrix_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (Intel AMX).

    As measured, bfloat16 is then five times as fast as float32; on other CPUs it is no faster.
    """
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()

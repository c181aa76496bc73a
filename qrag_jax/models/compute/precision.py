"""The precision policy: the dtype of each part of the computation.

| what | dtype |
|---|---|
| stacked parameters, target parameters, optimizer state, gradients | float32 |
| factors of the encoders' matrix products | `products` |
| activations between them | `activations` |
| sums inside products, softmax, mean and variance of LayerNorms | float32 |
| embeddings, Q-values, log-sum-exp, λ-returns, losses, metrics | float32 |

`config.encoder.dtype` sets `products` and `activations` together.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.errors import InputError

AUTO, FLOAT32, BFLOAT16 = NAMES = ("auto", "float32", "bfloat16")


class Precision(NamedTuple):
    """Dtypes of the encoders' computation (see the module)."""

    activations: jnp.dtype = jnp.dtype(jnp.float32)
    products: jnp.dtype = jnp.dtype(jnp.float32)


def precision(name: str) -> Precision:
    """The dtypes that "float32", "bfloat16" or "auto" (bfloat16 if it is faster here) stand for.

    On CPU only the products use bfloat16: nothing else is faster in it there.

    Raises:
        InputError: the name is unknown.
    """
    if name not in NAMES:
        raise InputError(f"config.encoder.dtype is {name!r}; use one of {', '.join(NAMES)}.")
    on_cpu = jax.default_backend() == "cpu"
    if name == AUTO:
        name = BFLOAT16 if not on_cpu or _has_matrix_unit() else FLOAT32
    if name == FLOAT32:
        return Precision()
    half = jnp.dtype(jnp.bfloat16)
    return Precision(jnp.dtype(jnp.float32) if on_cpu else half, half)


def _has_matrix_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (Intel AMX).

    As measured, bfloat16 is then five times as fast as float32; on other CPUs it is no faster.
    """
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()

"""The precision policy: the dtype of each part of the computation.

| what | dtype |
|---|---|
| stacked parameters, target parameters, optimizer state, gradients | float32 |
| factors of the encoders' matrix products | `products` |
| activations between them | `activations` |
| sums inside products, softmax, mean and variance of LayerNorms | float32 |
| embeddings, Q-values, log-sum-exp, λ-returns, losses, metrics | float32 |

`config.encoder.dtype` sets both; `config.encoder.activations` sets the activations apart. Products
of float32 factors are exact everywhere (`EXACT`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.errors import InputError
from qrag_jax.runtime.platform import Platform

AUTO, FLOAT32, BFLOAT16 = NAMES = ("auto", "float32", "bfloat16")
# Forms of attention: plain batched products, or cuDNN's fused kernel where it can.
PRODUCTS, FUSED = ATTENTION = ("products", "fused")
# Of products whose results are Q-values, embeddings or losses. By default a GPU rounds the factors
# of a float32 product to TF32, which keeps 10 bits of 23.
EXACT = jax.lax.Precision.HIGHEST
_FLOAT32 = jnp.dtype(jnp.float32)


def rounded_einsum(
    products: jnp.dtype,
    subscripts: str,
    one: jax.Array,
    other: jax.Array,
    result: jnp.dtype = _FLOAT32,
) -> jax.Array:
    """The sum of products that `jnp.einsum` names, of factors rounded to `products`."""
    one, other = one.astype(products), other.astype(products)
    exact = EXACT if products == jnp.float32 else None
    return jnp.einsum(subscripts, one, other, precision=exact, preferred_element_type=result)


class Precision(NamedTuple):
    """Dtypes of the encoders' computation (see the module), and the form of their attention.

    attention: a name of `ATTENTION`. The fused kernel takes half precision alone.
    """

    activations: jnp.dtype = jnp.dtype(jnp.float32)
    products: jnp.dtype = jnp.dtype(jnp.float32)
    attention: str = PRODUCTS


def precision(name: str, platform: Platform, activations: str = AUTO) -> Precision:
    """The dtypes that "float32", "bfloat16" or "auto" (bfloat16 if it is faster there) stand for.

    Args:
        name: of the products, and by default of the activations, too.
        activations: "auto": as the products, but float32 on CPU, where nothing else gains by
            bfloat16. "bfloat16" on CPU computes as accelerators do, in order to see what the
            rounding does.
    """
    full, half = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
    if name == BFLOAT16 and not platform.on_cpu and not platform.has_bfloat16:
        raise InputError(
            f"config.encoder.dtype is {BFLOAT16}, which GPUs have from compute capability 8.0 on, "
            f"and this one has {platform.capability}; use {FLOAT32}."
        )
    gains = _has_matrix_unit() if platform.on_cpu else platform.has_bfloat16
    products = half if name == BFLOAT16 or (name == AUTO and gains) else full
    if activations == BFLOAT16 and products == full:
        raise InputError(
            f"config.encoder.activations is {BFLOAT16}, but products are in {FLOAT32} with "
            f"config.encoder.dtype={name} here; set it to {BFLOAT16}, too."
        )
    if activations == AUTO:
        between = full if platform.on_cpu else products
    else:
        between = jnp.dtype(activations)
    fused = between == half and platform.has_fused_attention
    return Precision(between, products, FUSED if fused else PRODUCTS)


def _has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (Intel AMX).

    As measured, bfloat16 is then five times as fast as float32; on other CPUs it is no faster.
    """
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()

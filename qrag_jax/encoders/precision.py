"""The precision policy: what is computed in which dtype.

| what | dtype |
|---|---|
| parameters at rest, target parameters, optimizer state, gradients | float32 |
| linear maps and attention of the encoders, activations between them | `config.encoder.dtype` |
| mean and variance of LayerNorms, softmax, sums inside matrix products | float32 |
| embeddings, Q-values, log-sum-exp, λ-returns, losses, metrics | float32 |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qrag_jax.errors import InputError

AUTO = "auto"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def compute_dtype(name: str) -> jnp.dtype:
    """The dtype of the encoders' computation; "auto" is bfloat16 where the hardware gains by it.

    GPUs and TPUs do; XLA's CPU programs do not (measured: no faster than float32).

    Raises:
        InputError: the name is unknown.
    """
    if name == AUTO:
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in DTYPES:
        names = ", ".join((AUTO, *DTYPES))
        raise InputError(f"config.encoder.dtype is {name!r}; use one of {names}.")
    return jnp.dtype(DTYPES[name])

"""Measures the peaks of this machine's own device, as the estimator of step times asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qrag_jax.runtime.device_speeds import Speeds, speeds_of

ROUNDS = 7  # the best one counts: other programs of the machine only slow it down
SIZE = 1024  # of the factors of a product
CACHED = 2**20  # float32 elements of an array that is copied: 4 MiB, as a block's activations
TERMS, SMALL = 64, 2**16
STARTS = 200


def own_speeds() -> Speeds:
    """The device's known peaks, or those of a CPU, measured in some seconds."""
    device = jax.devices()[0]
    known = speeds_of(device.device_kind)
    if known is not None:
        return known
    return Speeds(
        title="this machine's processor, as measured",
        products={"f32": _products("float32"), "bf16": _products("bfloat16")},
        other=_other(),
        bandwidth=_bandwidth(),
        launch=_launch(),
    )


def best_seconds(function: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of some calls, after one that compiles."""
    jax.block_until_ready(function())
    return min(_seconds(function) for _ in range(rounds))


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def _products(dtype: str) -> float:
    """FLOP/s of a product of square factors."""
    factor = jax.random.normal(jax.random.key(0), (SIZE, SIZE), jnp.dtype(dtype))
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    return 2.0 * SIZE**3 / best_seconds(lambda: product(factor, factor))


def _other() -> float:
    """FLOP/s of multiplications and additions that depend on each other, element by element."""

    @jax.jit
    def polynomial(x: jax.Array) -> jax.Array:
        total = x
        for _ in range(TERMS):
            total = total * x + 0.5
        return total

    start = jnp.full(SMALL, 0.5)
    return 2.0 * TERMS * SMALL / best_seconds(lambda: polynomial(start))


def _bandwidth() -> float:
    """Bytes/s of adding to an array of `CACHED` elements: read once, written once.

    A CPU's blocks are chosen so that its caches hold them (`rollouts.block_shapes`).
    """
    add = jax.jit(lambda x: x + 1.0)
    array = jnp.zeros(CACHED)
    return 8.0 * CACHED / best_seconds(lambda: add(array))


def _launch() -> float:
    """Seconds of one kernel with next to no work, in a program of `STARTS` that cannot be fused."""

    @jax.jit
    def many(x: jax.Array) -> jax.Array:
        for _ in range(STARTS):
            x = jnp.sort(x)[::-1]  # a sort is never fused
        return x

    start = jnp.arange(8.0)
    return best_seconds(lambda: many(start)) / STARTS / 2  # the reversal is a kernel, too

"""Measures the speed limit of the machine: a large matrix product in jax and in torch."""

from __future__ import annotations

import dataclasses
import os
from functools import partial

import jax
import jax.numpy as jnp
import torch

from benchmarks.measure import Timing, interleave, on_gpu
from benchmarks.report import Case


@dataclasses.dataclass(frozen=True)
class Peaks:
    """FLOP/s of the best round, in jax and in torch."""

    jax: float
    torch: float


def measure_peaks(rounds: int, dtype: str) -> tuple[Peaks, Case]:
    """Times the product of n×n matrices; n is 2048 on CPU, 8192 on GPU. Ours sums in float32."""
    n = 8192 if on_gpu() else 2048
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.dtype(dtype))
    b = torch.randn((n, n), dtype=getattr(torch, dtype), device="cuda" if on_gpu() else "cpu")
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else "unknown"

    def ours(_: int) -> None:
        product(a, a).block_until_ready()

    def theirs(_: int) -> None:
        torch.matmul(b, b)
        if on_gpu():
            torch.cuda.synchronize()

    timings = interleave({"ours": ours, "torch": theirs}, max(rounds, 5))
    peaks = Peaks(*(_rate(timings[name], n) for name in ("ours", "torch")))
    return peaks, Case(
        f"matmul peak, {dtype}, {n}x{n}",
        peaks.jax / 1e9,
        "GFLOP/s",
        peer=peaks.torch / 1e9,
        ratio=peaks.jax / peaks.torch,
        details={
            "peer": "torch.matmul",
            # Other busy programs make torch's threads wait for each other: ratios look too good.
            "processes running on the machine before, 1 minute's mean": load,
            "median time, s": timings["ours"].median,
            "peer: median time, s": timings["torch"].median,
        },
    )


def _rate(timing: Timing, n: int) -> float:
    return 2.0 * n**3 / min(timing.seconds)

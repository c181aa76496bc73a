"""Measures speed: interleaved rounds, peak memory, and the work that a program does."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from qrag_jax.models.trunks.bert import BertConfig
from qrag_jax.models.trunks.qwen3 import Qwen3Config
from qrag_jax.runtime.process import peak_bytes

CLEAR_PEAK = Path("/proc/self/clear_refs")


@dataclasses.dataclass
class Work:
    """What one run of a program does.

    Attributes:
        text: tokens that carry text.
        computed: all tokens that were computed.
        flops: FLOPs that the task needs (text tokens alone, nothing computed twice). They are the
            same for all programs.
    """

    text: float
    computed: float
    flops: float


@dataclasses.dataclass
class Timing:
    """The measurements of one program.

    Attributes:
        seconds: of each measured round.
        compile: seconds of the first call beyond those of a later call.
        memory: peak bytes during the first calls: of the process on CPU, of the program's arrays on
            GPU.
    """

    seconds: list[float]
    compile: float
    memory: float

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


def on_gpu() -> bool:
    """Whether jax computes on a GPU."""
    return jax.default_backend() == "gpu"


def interleave(
    programs: Mapping[str, Callable[[int], object]], rounds: int, warmups: int = 1
) -> dict[str, Timing]:
    """Times programs in turns: a, b, a, b, …

    Each program is called with the number of the call, from 0, and must wait for its result.
    """
    result: dict[str, Timing] = {}
    for name, program in programs.items():
        reset_peak_memory()
        first = _seconds(program, 0)
        again = [_seconds(program, i) for i in range(1, 1 + warmups)]
        result[name] = Timing([], max(first - min(again), 0.0), peak_memory(name == "ours"))
    for i in range(rounds):
        for name, program in programs.items():
            result[name].seconds.append(_seconds(program, 1 + warmups + i))
    return result


def _seconds(program: Callable[[int], object], number: int) -> float:
    start = time.perf_counter()
    program(number)
    return time.perf_counter() - start


def ratio(ours: Timing, peer: Timing) -> float:
    """The median over rounds of the peer's time to ours: above 1, ours is faster."""
    return statistics.median(p / o for o, p in zip(ours.seconds, peer.seconds, strict=True))


def reset_peak_memory() -> None:
    """Resets the peak if the system allows it; the peak of jax's arrays on a GPU stays."""
    if on_gpu():
        import torch

        torch.cuda.reset_peak_memory_stats()
    elif CLEAR_PEAK.exists():
        CLEAR_PEAK.write_text("5")


def peak_memory(ours: bool) -> float:
    """Peak bytes: of the process on CPU, of jax's (`ours`) or torch's arrays on a GPU."""
    if on_gpu():
        import torch

        stats = jax.devices()[0].memory_stats() or {}
        return float(stats["peak_bytes_in_use"] if ours else torch.cuda.max_memory_allocated())
    return float(peak_bytes())


def peak_growth(program: Callable[[], object], *, ours: bool) -> float:
    """Bytes that a program needs at its peak beyond what is there before it runs."""
    reset_peak_memory()
    before = peak_memory(ours)
    program()
    return max(peak_memory(ours) - before, 0.0)


def forward_flops(config: BertConfig | Qwen3Config, lengths: Sequence[int] | np.ndarray) -> float:
    """FLOPs of one forward pass over rows of these lengths, without lookups, norms, activations.

    A layer of BERT takes `2·(4h² + 2hi) + 4·L·h` per token of a row of L tokens. A layer of Qwen3,
    whose q query heads and k key heads have width d, takes `2·(2hqd + 2hkd + 3hi) + 2·(L + 1)·q·d`:
    a token sees only itself and the tokens before it.
    """
    row = np.asarray(lengths, np.float64)
    width, inner = config.hidden_size, config.intermediate_size
    if isinstance(config, Qwen3Config):
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        dense = 2.0 * (2 * width * query + 2 * width * key + 3 * width * inner) * row.sum()
        attention = 2.0 * query * (np.square(row) + row).sum()
    else:
        dense = 2.0 * (4 * width**2 + 2 * width * inner) * row.sum()
        attention = 4.0 * width * np.square(row).sum()
    return config.num_hidden_layers * float(dense + attention)


def details(
    ours: tuple[Work, Timing], peer: tuple[Work, Timing] | None, peak: float
) -> dict[str, float | str]:
    """The figures behind a case; `peak` is the measured matmul peak in FLOP/s."""
    result: dict[str, float | str] = {}
    for prefix, measured in (("", ours), ("peer: ", peer)):
        if measured is None:
            continue
        work, timing = measured
        rate = work.flops / timing.median
        result |= {
            f"{prefix}text tokens": work.text,
            f"{prefix}computed tokens": work.computed,
            f"{prefix}padding share": 1.0 - work.text / max(work.computed, 1.0),
            f"{prefix}model FLOPs": work.flops,
            f"{prefix}median time, s": timing.median,
            f"{prefix}achieved FLOP/s": rate,
            f"{prefix}share of matmul peak": rate / peak,
            f"{prefix}peak memory, GiB": timing.memory / 2**30,
            f"{prefix}compile time, s": timing.compile,
        }
    return result

"""Estimated times of the programs that the suite `gpu` compiles for devices that are not here.

Their rows are invented: every one has `MEAN_TOKENS` tokens, as `memory_cases` assumes for blocks;
those of HARR's updates are longer (`gpu_query`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.memory_cases import BLOCK_TOKENS, MEAN_TOKENS
from benchmarks.report import Case
from qrag_jax.runtime import step_time, step_time_lines
from qrag_jax.runtime.device_speeds import speeds_of
from qrag_jax.runtime.step_time import Assumptions, Rounds


def estimate_row(
    text: str, device_kind: str, loops: Mapping[tuple[int, int], Rounds]
) -> dict[str, Any] | None:
    """The estimate of a compiled program, as JSON holds it; None for devices of unknown peaks.

    Args:
        text: its HLO.
        device_kind: JAX's name of the device.
        loops: the course of its loops (`dry_run.Program`); none: as if all rows were alike.
    """
    speeds = speeds_of(device_kind)
    if speeds is None:
        return None
    found = step_time.estimate(text, speeds, Assumptions(loops or even_rounds(text)))
    return {
        "seconds": found.seconds,
        "share_of_peak": found.share_of_peak(),
        "bound": found.bound,
        "lines": list(step_time_lines.lines(found)),
    }


def round_seconds(text: str, device_kind: str) -> list[float]:
    """The estimated time of one round of each outermost loop; none for devices of unknown peaks."""
    speeds = speeds_of(device_kind)
    if speeds is None:
        return []
    return [found.seconds for found in step_time.estimates_of_rounds(text, speeds)]


def even_rounds(text: str) -> dict[tuple[int, int], Rounds]:
    """The course of every loop over rows in a program, as if all rows were of the mean length."""
    rounds = {}
    for count, width in step_time.rows_of_loops(text):
        in_block = BLOCK_TOKENS // min(MEAN_TOKENS, width)
        rounds[count, width] = Rounds(float(-(-count // in_block)))
    return rounds


def estimate_cases(name: str, row: dict[str, Any]) -> list[Case]:
    """The estimated time of a program of the suite, without a target; none without an estimate."""
    found = row.get("estimate")
    if found is None:
        return []
    lines = {str(number): line for number, line in enumerate(found["lines"], 1)}
    return [Case(f"{name}: estimated time", found["seconds"] * 1e3, "ms", details=lines)]


def estimate_cell(row: dict[str, Any]) -> str:
    """A cell of the suite's table: milliseconds, share of the peak, and what bounds it."""
    found = row.get("estimate")
    if found is None:
        return ""
    return f"{found['seconds'] * 1e3:.3g}, {found['share_of_peak']:.0%}, {found['bound']}"

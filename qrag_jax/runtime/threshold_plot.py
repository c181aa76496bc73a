"""Plots scores against the stopping threshold, and against the length of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.runtime.whole_files import replacing

_SCORES = {
    "fact_f1": ("Fact F1", "#2ca02c", 2.0),
    "fact_precision": ("Fact precision", "#7f4fbf", 1.2),
    "fact_recall": ("Fact recall", "#1f77b4", 1.2),
    "fact_em": ("Fact EM", "#e08a00", 1.2),
}
_STEPS, _CHOSEN = "#d62728", "#000000"


def plot_thresholds(
    thresholds: Sequence[float],
    scores: Mapping[str, Sequence[float]],
    chosen: float,
    out: Path,
    title: str,
) -> None:
    """Draws a PNG: fact F1, precision, recall and EM above, the mean number of steps below.

    Needs no display.

    Args:
        thresholds: `[K]`, falling or rising.
        scores: `fact_f1`, `fact_precision`, `fact_recall`, `fact_em` and `steps`, `[K]` each.
        chosen: the threshold marked by a dashed line in both panels.
        out: the PNG to write; its folder is made if absent.
        title: shown above the panels.
    """
    # Imported here because the import is slow and most processes draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.5), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    figure.suptitle(title)
    for name, (label, colour, width) in _SCORES.items():
        # A score jumps at a Q between two thresholds; the jump is drawn in the middle of them.
        top.plot(
            thresholds,
            scores[name],
            color=colour,
            linewidth=width,
            label=label,
            drawstyle="steps-mid",
        )
    top.set_ylim(-0.02, 1.02)
    top.set_ylabel("mean over the questions")
    bottom.plot(thresholds, scores["steps"], color=_STEPS, drawstyle="steps-mid")
    bottom.set_ylabel("chunks taken, mean")
    bottom.set_xlabel("stop at the first step with Q at most this")
    for axes in (top, bottom):
        axes.axvline(chosen, color=_CHOSEN, linestyle="--", label=f"chosen: {chosen:.4g}")
        axes.grid(alpha=0.3)
    top.legend(loc="best", fontsize="small")
    with replacing(out) as file:
        figure.savefig(file, format="png")


def plot_lengths(results: Sequence[Mapping[str, Any]], out: Path, title: str) -> None:
    """Draws three panels over a logarithmic axis of chunks, as a PNG. Needs no display.

    Args:
        results: one result per length, with `chunks`, `fact_em`, `fact_f1`, `intervals` of these
            two scores, `seconds_per_episode` and `peak_memory_mib` (the last two may be None).
        out: the PNG to write; its folder is made if absent.
        title: shown above the panels.
    """
    # Imported here because the import is slow and most processes draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 9.0), dpi=120, layout="constrained")
    accuracy, seconds, memory = figure.subplots(3, 1, sharex=True)
    figure.suptitle(title)
    lengths = [result["chunks"] for result in results]
    for name, label in (("fact_em", "Fact EM"), ("fact_f1", "Fact F1")):
        values = [result[name] for result in results]
        ends = [result["intervals"][name] for result in results]
        accuracy.plot(lengths, values, marker="o", label=label)
        accuracy.fill_between(
            lengths, [e["low"] for e in ends], [e["high"] for e in ends], alpha=0.2
        )
    accuracy.set_ylim(-0.02, 1.02)
    accuracy.set_ylabel("accuracy, 95 % interval")
    accuracy.legend(loc="best", fontsize="small")
    for axes, name, label in (
        (seconds, "seconds_per_episode", "seconds an episode"),
        (memory, "peak_memory_mib", "peak memory, MiB"),
    ):
        known = [(r["chunks"], r[name]) for r in results if r[name] is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o")
        axes.set_ylabel(label)
    seconds.set_yscale("log")
    for axes in (accuracy, seconds, memory):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    memory.set_xlabel("chunks of a document")
    memory.set_ylim(bottom=0)
    with replacing(out) as file:
        figure.savefig(file, format="png")

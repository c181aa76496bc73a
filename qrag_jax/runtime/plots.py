"""Plots: the learning curve; scores against the stopping threshold, and against length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrag_jax.runtime.whole_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EM, _F1, _LOSS, _Q = "#1f77b4", "#2ca02c", "#d62728", "#7f4fbf"
_RECALL = "#17a2b8"
# Of Q-RAG's evaluations, and of those of agents.
_EVALUATED = {
    "eval/fact_em": ("Fact EM", _EM),
    "eval/fact_f1": ("Fact F1", _F1),
    "eval/answer_found": ("Answer in a chunk taken", _RECALL),
    "eval/em": ("Answer EM", _EM),
    "eval/f1": ("Answer F1", _F1),
    "eval/recall": ("Recall of gold passages", _RECALL),
}
_BASELINES = {
    "untrained/fact_em": ("Fact EM, untrained", "#888888"),
    "single_step/fact_em": ("Fact EM, single step", "#e08a00"),
    "untrained/answer_found": ("Answer in a chunk taken, untrained", "#888888"),
    "untrained/f1": ("Answer F1, untrained", "#888888"),
}
_STOPPED = {
    "fact_f1": ("Fact F1", "#2ca02c", 2.0),
    "fact_precision": ("Fact precision", "#7f4fbf", 1.2),
    "fact_recall": ("Fact recall", "#1f77b4", 1.2),
    "fact_em": ("Fact EM", "#e08a00", 1.2),
}
_STEPS, _CHOSEN = "#d62728", "#000000"
_ON_THE_RIGHT = {"train/mean_q": "mean Q", "train/return": "mean return"}


def plot_curve(metrics: Sequence[Mapping[str, float | None]], out: Path, title: str) -> None:
    """Draws a PNG against the optimizer step: evaluation above, training below.

    Above: fact EM and F1, or an agent's answer EM and F1 and its recall, with dashed lines at the
    last values of what they are compared with. Below: `train/loss`, raw and smoothed, and
    `train/mean_q` on a second axis; of agents, `train/entropy` of the first passage drawn and
    `train/return`, because the loss of a policy that has just acted is 0 by its making. Needs no
    display. Values that are missing, None, NaN or infinite are left out.

    Args:
        metrics: rows with `step` and any of the names above, as from `read_metrics`.
        out: the PNG to write; its folder is made if absent.
        title: shown above the panels.
    """
    figure = _figure(7.0, title)
    top, bottom = figure.subplots(2, 1, sharex=True)
    _draw_evaluation(top, metrics)
    _draw_training(bottom, metrics)
    bottom.set_xlabel("optimizer step")
    _save(figure, out)


def _draw_evaluation(axes: Axes, metrics: Sequence[Mapping[str, float | None]]) -> None:
    drawn = False
    for name, (label, colour) in _EVALUATED.items():
        steps, values = _series(metrics, name)
        if steps:
            axes.plot(steps, values, marker="o", markersize=3.5, color=colour, label=label)
            drawn = True
    for name, (label, colour) in _BASELINES.items():
        _, values = _series(metrics, name)
        if values:
            label = f"{label} ({values[-1]:.3f})"
            axes.axhline(values[-1], linestyle="--", linewidth=1.2, color=colour, label=label)
    if not drawn:
        axes.text(0.5, 0.5, "no evaluation yet", ha="center", va="center", transform=axes.transAxes)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("score")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize="small")


def _draw_training(axes: Axes, metrics: Sequence[Mapping[str, float | None]]) -> None:
    # Q-RAG has entropy and return as well, which tell less of it than loss and mean Q.
    of_agent = not _series(metrics, "train/mean_q")[0] and bool(
        _series(metrics, "train/entropy")[0]
    )
    of_left, label = ("train/entropy", "entropy, nats") if of_agent else ("train/loss", "loss")
    of_right = "train/return" if of_agent else "train/mean_q"
    steps, values = _series(metrics, of_left)
    if steps:
        axes.plot(steps, values, color=_LOSS, alpha=0.25, linewidth=0.8, label=label)
        smooth = f"{label}, smoothed"
        axes.plot(steps, _smoothed(values), color=_LOSS, linewidth=1.6, label=smooth)
    else:
        axes.text(0.5, 0.5, "no training yet", ha="center", va="center", transform=axes.transAxes)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    steps, values = _series(metrics, of_right)
    if steps:
        right, name = axes.twinx(), _ON_THE_RIGHT[of_right]
        right.plot(steps, values, color=_Q, linewidth=1.2, label=f"{name} (right)")
        right.set_ylabel(name)
        handles += right.get_legend_handles_labels()[0]
        labels += right.get_legend_handles_labels()[1]
    if handles:
        # Above the panel, because the right axis is drawn over everything inside the left one.
        axes.legend(
            handles,
            labels,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=3,
            fontsize="small",
            frameon=False,
        )


def _series(
    metrics: Sequence[Mapping[str, float | None]], name: str
) -> tuple[list[float], list[float]]:
    """Steps and values of the rows in which `name` is a finite number."""
    steps: list[float] = []
    values: list[float] = []
    for row in metrics:
        step, value = row.get("step"), row.get(name)
        if step is not None and value is not None and math.isfinite(value):
            steps.append(step)
            values.append(value)
    return steps, values


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about a thirtieth of the curve, without start-up bias."""
    keep = 1.0 - 1.0 / max(1.0, len(values) / 30.0)
    total, weight = 0.0, 0.0
    averages = []
    for value in values:
        total = keep * total + value
        weight = keep * weight + 1.0
        averages.append(total / weight)
    return averages


def plot_thresholds(
    thresholds: Sequence[float],
    scores: Mapping[str, Sequence[float]],
    chosen: float,
    out: Path,
    title: str,
) -> None:
    """Draws a PNG: fact F1, precision, recall and EM above, the mean number of steps below.

    Args:
        thresholds: `[K]`, falling or rising.
        scores: `fact_f1`, `fact_precision`, `fact_recall`, `fact_em` and `steps`, `[K]` each.
        chosen: the threshold marked by a dashed line in both panels.
    """
    figure = _figure(6.5, title)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for name, (label, colour, width) in _STOPPED.items():
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
    _save(figure, out)


def plot_lengths(results: Sequence[Mapping[str, Any]], out: Path, title: str) -> None:
    """Draws three panels over a logarithmic axis of chunks, as a PNG.

    Args:
        results: one result per length, with `chunks`, `fact_em`, `fact_f1`, `intervals` of these
            two scores, `seconds_per_episode` and `peak_memory_mib` (the last two may be None).
    """
    figure = _figure(9.0, title)
    accuracy, seconds, memory = figure.subplots(3, 1, sharex=True)
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
    _save(figure, out)


def _figure(height: float, title: str) -> Figure:
    """A figure that needs no display."""
    # Imported here because the import is slow and most processes draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), dpi=120, layout="constrained")
    figure.suptitle(title)
    return figure


def _save(figure: Figure, out: Path) -> None:
    """Writes a PNG; its folder is made if absent."""
    with replacing(out) as file:
        figure.savefig(file, format="png")

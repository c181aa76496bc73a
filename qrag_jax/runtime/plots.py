"""Plots: the learning curve; scores against the stopping threshold, and against length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrag_jax.runtime.whole_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float | None]]

# Of Q-RAG's evaluations, and of those of agents.
_EVALUATED = {
    "eval/fact_em": "Fact EM",
    "eval/fact_f1": "Fact F1",
    "eval/answer_found": "Answer in a chunk taken",
    "eval/em": "Answer EM",
    "eval/f1": "Answer F1",
    "eval/recall": "Recall of gold passages",
}
_BASELINES = {
    "untrained/fact_em": "Fact EM, untrained",
    "single_step/fact_em": "Fact EM, single step",
    "untrained/answer_found": "Answer in a chunk taken, untrained",
    "untrained/f1": "Answer F1, untrained",
}
_STOPPED = {
    "fact_f1": "Fact F1",
    "fact_precision": "Fact precision",
    "fact_recall": "Fact recall",
    "fact_em": "Fact EM",
}


def plot_curve(metrics: Rows, out: Path, title: str) -> None:
    """Draws a PNG against the optimizer step: evaluation above, training below, raw and smoothed.

    Below are `train/loss` and `train/mean_q`; of agents, `train/entropy` of the first passage drawn
    and `train/return`, because the loss of a policy that has just acted is 0 by its making. Values
    that are not finite are left out.

    Args:
        metrics: rows with `step` and any of the names above, as from `read_metrics`.
    """
    below = {"train/loss": "loss", "train/mean_q": "mean Q"}
    # Q-RAG has entropy and return as well, which tell less of it than loss and mean Q.
    if not _series(metrics, "train/mean_q")[0] and _series(metrics, "train/entropy")[0]:
        below = {"train/entropy": "entropy, nats", "train/return": "mean return"}
    known = {label: _series(metrics, name) for name, label in below.items()}
    known = {label: series for label, series in known.items() if series[0]}
    figure, (top, *others) = _figure(4.0 + 2.5 * len(known), title, 1 + len(known))
    for name, label in _EVALUATED.items():
        steps, values = _series(metrics, name)
        if steps:
            top.plot(steps, values, marker="o", markersize=3.5, label=label)
    for number, (name, label) in enumerate(_BASELINES.items(), 6):
        _, values = _series(metrics, name)
        if values:
            label = f"{label} ({values[-1]:.3f})"
            top.axhline(values[-1], ls="--", lw=1.2, color=f"C{number}", label=label)
    _label_share(top, "score")
    for axes, (label, (steps, values)) in zip(others, known.items(), strict=True):
        axes.plot(steps, values, color="C3", alpha=0.25, lw=0.8)
        axes.plot(steps, _smoothed(values), color="C3", lw=1.6)
        axes.set_ylabel(label)
    figure.supxlabel("optimizer step", fontsize="medium")
    _save(figure, out)


def _series(metrics: Rows, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of the rows in which `name` is a finite number."""
    pairs = ((row.get("step"), row.get(name)) for row in metrics)
    known = [(s, v) for s, v in pairs if s is not None and v is not None and math.isfinite(v)]
    return [step for step, _ in known], [value for _, value in known]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about a thirtieth of the curve, without start-up bias."""
    keep = 1.0 - 1.0 / max(1.0, len(values) / 30.0)
    sums = itertools.accumulate(values, lambda total, value: keep * total + value)
    weights = itertools.accumulate([1.0] * len(values), lambda total, one: keep * total + one)
    return [total / weight for total, weight in zip(sums, weights)]


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
    figure, (top, bottom) = _figure(6.5, title, 2, height_ratios=[2, 1])
    # A score jumps at a Q between two thresholds; the jump is drawn in the middle of them.
    for name, label in _STOPPED.items():
        top.plot(thresholds, scores[name], label=label, drawstyle="steps-mid")
    bottom.plot(thresholds, scores["steps"], drawstyle="steps-mid")
    for axes in (top, bottom):
        axes.axvline(chosen, color="black", ls="--", label=f"chosen: {chosen:.4g}")
    _label_share(top, "mean over the questions")
    bottom.set_ylabel("chunks taken, mean")
    bottom.set_xlabel("stop at the first step with Q at most this")
    _save(figure, out)


def plot_lengths(results: Sequence[Mapping[str, Any]], out: Path, title: str) -> None:
    """Draws three panels over a logarithmic axis of chunks, as a PNG.

    Args:
        results: one result per length, with `chunks`, `scores`, `seconds_per_episode` and
            `peak_memory_mib` (the last two may be None).
    """
    figure, (accuracy, seconds, memory) = _figure(9.0, title, 3)
    lengths = [result["chunks"] for result in results]
    for name, label in (("fact_em", "Fact EM"), ("fact_f1", "Fact F1")):
        scores = [result["scores"][name] for result in results]
        mean, low, high = ([score[end] for score in scores] for end in ("mean", "low", "high"))
        accuracy.plot(lengths, mean, marker="o", label=label)
        accuracy.fill_between(lengths, low, high, alpha=0.2)
    _label_share(accuracy, "accuracy, 95 % interval")
    for axes, name in ((seconds, "seconds_per_episode"), (memory, "peak_memory_mib")):
        known = [(r["chunks"], r[name]) for r in results if r[name] is not None]
        axes.plot([length for length, _ in known], [value for _, value in known], marker="o")
    seconds.set(yscale="log", ylabel="seconds an episode", xscale="log")  # the axes share it
    memory.set(ylabel="peak memory, MiB", xlabel="chunks of a document")
    memory.set_ylim(bottom=0)
    _save(figure, out)


def _label_share(axes: Axes, label: str) -> None:
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel(label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize="small")


def _figure(height: float, title: str, panels: int, **how: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure that needs no display, with panels one below the other."""
    # Imported here because the import is slow and most processes draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), dpi=120, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, **how)[:, 0]
    for ax in axes:
        ax.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, out: Path) -> None:
    with replacing(out) as file:
        figure.savefig(file, format="png")

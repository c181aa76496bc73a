"""Plots scores against the stopping threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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

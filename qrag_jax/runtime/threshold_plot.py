"""Fact F1, precision, recall and steps against the threshold of a rule for stopping."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def plot_thresholds(
    thresholds: np.ndarray,
    scores: dict[str, np.ndarray],
    steps: np.ndarray,
    chosen: float,
    out: Path,
    title: str,
) -> None:
    """Draws the scores above and the mean steps below, as a PNG. Needs no display.

    Args:
        thresholds: `[n]` ascending; an infinite one is left out. scores: name → `[n]`.
        chosen: marked. out: the PNG to write; its folder is made if absent.
    """
    # Imported here: it takes long, and most processes draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 7.0), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title)
    finite = np.isfinite(thresholds)
    for name, values in scores.items():
        top.step(thresholds[finite], values[finite], where="post", label=name.replace("_", " "))
    bottom.step(thresholds[finite], steps[finite], where="post", color="#7f4fbf")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        if np.isfinite(chosen):
            axes.axvline(chosen, linestyle="--", color="#d62728", label=f"chosen {chosen:.4g}")
    top.set_ylim(-0.02, 1.02)
    top.legend(loc="best", fontsize="small")
    bottom.set_ylabel("mean steps")
    bottom.set_xlabel("stop before a step whose Q is at most")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")

"""Learning curves for the page, from the lines of a `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from qrag_jax.evaluators.shown.page import Curve

POINTS = 400  # of one curve, at most


def curves_of(lines: Sequence[Mapping[str, float]]) -> tuple[Curve, ...]:
    """All metrics that have a finite value, each with at most `POINTS` of its points.

    Args:
        lines: with `step`, oldest first, as `read_metrics` gives them. Of a step that was written
            twice the later value counts.
    """
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and math.isfinite(value):
                found.setdefault(name, {})[int(line["step"])] = float(value)
    return tuple(_curve(name, points) for name, points in found.items())


def _curve(name: str, points: Mapping[int, float]) -> Curve:
    steps = sorted(points)
    kept = steps
    if len(steps) > POINTS:
        kept = [steps[n] for n in np.linspace(0, len(steps) - 1, POINTS).round().astype(int)]
    values = [float(f"{points[step]:.6g}") for step in kept]
    return Curve(name, kept, values, thinned=len(kept) < len(steps))

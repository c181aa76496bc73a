"""Bootstrap confidence intervals of a mean over samples (Efron, 1979), by SciPy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.floating]

_BLOCK = 1 << 20  # values drawn at a time: 8 MB of indices and 8 MB of values
_LEVEL, _RESAMPLES, _SEED = 0.95, 2000, 0


def mean_interval(values: Values) -> tuple[float, float, float]:
    """Mean and 95 % percentile bootstrap interval of `[n]` values, n ≥ 1: (mean, low, high).

    Values that are all equal (a single one too) give an interval of no width, a known limit of the
    method: an EM of 1.0 on every sample does not show that the true EM is 1.0.
    """
    data = np.asarray(values, np.float64)
    if data.min() == data.max():  # exact, while the mean of equal numbers may round
        constant = float(data[0])
        return constant, constant, constant

    from scipy import stats  # imported here: it takes long, and most processes need no interval

    low, high = stats.bootstrap(
        (data,),
        np.mean,
        n_resamples=_RESAMPLES,
        batch=max(1, _BLOCK // data.size),
        confidence_level=_LEVEL,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(data.mean()), float(low), float(high)


def half_width(values: Values) -> float:
    """Half of the 95 % interval of a mean, by its standard error, n ≥ 2: for learning curves.

    Near the bootstrap's from 20 values on, and far cheaper: one is made of each score at each step.
    """
    return 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def crossed_interval(values: NDArray[np.floating]) -> tuple[float, float, float]:
    """Mean and bootstrap interval of `[trainings, questions]`: (mean, low, high).

    Both are drawn again, apart from each other (Owen, 2007, "The pigeonhole bootstrap"): one lucky
    training does not count as many questions. Of a single training only questions are drawn.
    """
    data = np.asarray(values, np.float64)
    if len(data) == 1 or data.min() == data.max():
        return mean_interval(data[0])
    rows, columns = data.shape
    draws, means = np.random.default_rng(_SEED), []
    for first in range(0, _RESAMPLES, most := max(1, _BLOCK // columns)):
        size = min(most, _RESAMPLES - first)
        of_rows = draws.multinomial(rows, np.full(rows, 1 / rows), size)
        of_columns = draws.multinomial(columns, np.full(columns, 1 / columns), size)
        means.append(np.einsum("br,rc,bc->b", of_rows, data, of_columns, optimize=True))
    drawn = np.concatenate(means) / data.size
    low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(data.mean()), float(low), float(high)


def columns_of(rows: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values by their names, of the rows that have them."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def means(columns: Mapping[str, Values]) -> dict[str, float]:
    """The mean of each column, 0 of nothing."""
    return {
        name: float(np.mean(values)) if len(values) else 0.0 for name, values in columns.items()
    }


def with_intervals(columns: Mapping[str, Values]) -> dict[str, dict[str, float]]:
    """Each column's mean with its 95% bootstrap interval, as {"mean", "low", "high"}."""
    return {name: named(mean_interval(values)) for name, values in columns.items() if len(values)}


def gains(columns: Mapping[str, Values], others: Mapping[str, Values]) -> dict[str, dict]:
    """The paired differences of all columns, as `with_intervals`; {} of nothing.

    Values are of the same samples in one order, so what is hard for both cancels out.
    """
    return with_intervals({name: np.subtract(columns[name], others[name]) for name in columns})


def named(interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), interval, strict=True))


def interval_text(interval: Mapping[str, float], sign: bool = False) -> str:
    """{"mean", "low", "high"} as `0.812 [0.790, 0.833]`; with `sign`, numbers ≥ 0 have a plus."""
    form = "+.3f" if sign else ".3f"
    return f"{interval['mean']:{form}} [{interval['low']:{form}}, {interval['high']:{form}}]"


def score_table(
    scores: Iterable[tuple[str, Mapping[str, Any]]],
    columns: Sequence[str],
    counts: Mapping[str, str] | None = None,
    gains: Iterable[tuple[str, Mapping[str, Any]]] = (),
    title: str = "",
) -> list[str]:
    """Scores with their intervals, a line for each name; below them the gains over others.

    `counts` are further columns: heading → what a line has there, a format of its scores.
    """
    counts = counts or {}

    def cells(row: Mapping[str, Any], missing: str, *, sign: bool = False) -> list[str]:
        return [interval_text(row[name], sign) if name in row else missing for name in columns]

    lines = [[title, *columns, *counts]]
    for name, row in scores:
        counted = (form.format_map(row) for form in counts.values())
        lines.append([name, *cells(row, "-" if row else ""), *counted])
    for name, row in gains:
        lines.append([f"gain over {name}", *cells(row, "", sign=True), *("" for _ in counts)])
    return columns_text(lines)


def causes_text(misses: Iterable[Any]) -> str:
    """How often each cause occurs, the most frequent first: `timeout 3, too_long 1`."""
    counts = Counter(miss.cause for miss in misses)
    return ", ".join(f"{cause} {count}" for cause, count in counts.most_common())


def columns_text(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines with each column as wide as its widest cell, and two blanks between."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]

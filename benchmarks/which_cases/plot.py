"""Draws what each line of the suite which finds, against the time of a question."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.which_cases.found import READ
from benchmarks.which_cases.row import TRAINED, UNTRAINED
from benchmarks.which_cases.settings import SETTINGS
from benchmarks.which_cases.table import COMPARED, Scored, is_compared, score_of


def draw(lines: Sequence[Scored], path: Path) -> Path:
    """Draws the share with all gold passages read against the milliseconds of a question."""
    import matplotlib.pyplot as plt

    drawn = list(shown(lines))
    there = [where for where in SETTINGS if any(line.trained_in == where for line in drawn)]
    figure, axes = plt.subplots(
        1, len(there), figsize=(5 * len(there) + 3, 5), squeeze=False, layout="constrained"
    )
    colours = [plt.get_cmap("tab20")(n) for n in range(20)]
    numbers = {title: n for n, title in enumerate(dict.fromkeys(x.title for x in drawn), 1)}
    handles: dict[str, Any] = {}
    for axis, where in zip(axes[0], there, strict=True):
        for line in (each for each in drawn if each.trained_in == where):
            times = [each.asking.milliseconds for each in line.found[where]]
            known = [each for each in times if each is not None]
            score, number = score_of(line, COMPARED), numbers[line.title]
            if not known or score is None:
                continue
            at = statistics.mean(known)
            ends = [[max(score.mean - score.low, 0.0)], [max(score.high - score.mean, 0.0)]]
            handles[line.title] = axis.errorbar(
                [at],
                [score.mean],
                yerr=ends,
                fmt=_marker(line),
                color=colours[(number - 1) % len(colours)],
                capsize=2,
                label=f"{number}  {line.title}",
            )
            axis.annotate(
                str(number), (at, score.mean), xytext=(5, 3), textcoords="offset points", fontsize=8
            )
        axis.set_xscale("log")
        axis.set_xlabel("milliseconds a question, all asked side by side")
        axis.set_ylabel(f"share of questions with all gold within {READ} passages")
        axis.set_title(where)
    labelled = [handles[title] for title in numbers if title in handles]
    figure.legend(handles=labelled, loc="outside right upper", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def shown(lines: Sequence[Scored]) -> Iterator[Scored]:
    """The lines of the plot: not the second search of a trained model, and no two that are one."""
    seen: list[tuple[list[np.ndarray], str]] = []
    for line in lines:
        own = line.column(COMPARED)
        beside = [each for each, where in seen if where == line.trained_in]
        if line.way == UNTRAINED or not line.row.seeds or not line.way.startswith(TRAINED):
            # HARR by either algorithm begins with one encoder.
            if any(np.array_equal(own, each, equal_nan=True) for each in beside):
                continue
        elif not is_compared(line):
            continue
        seen.append((own, line.trained_in))
        yield line


def _marker(line: Scored) -> str:
    if line.row.in_use:
        return "^" if line.way == TRAINED else "v"
    return "o" if line.training or not line.row.seeds else "x"

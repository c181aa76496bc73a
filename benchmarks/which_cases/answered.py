"""A table of the suite which: what a language model answers that has read what each row found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.report import markdown
from benchmarks.which_cases.answers import GOLD, NOTHING
from benchmarks.which_cases.scores import Interval, difference, interval
from benchmarks.which_cases.table import READ, Scored, interval_cell, score_of

EM, F1 = f"em@{READ}", f"f1@{READ}"
HEADER = ["what is read", EM, F1, f"{F1} less that of {NOTHING}", f"{GOLD} less it"]


def tables(lines: Sequence[Scored], parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A section in Markdown for each setting that was answered.

    Args:
        lines: of all settings, with their columns of answers.
        parts: SETTING/answers → its result.
    """
    for name, part in parts.items():
        where = name.partition("/")[0]
        bounds = {read: np.array(part["bounds"][read][F1], float) for read in (GOLD, NOTHING)}
        rows = [
            _cells(read, interval([np.array(columns[EM], float)]), [bounds[read]], bounds)
            for read, columns in part["bounds"].items()
        ]
        rows += [
            _cells(line.title, score_of(line, EM), line.column(F1), bounds)
            for line in lines
            if line.trained_in == where and line.column(F1)
        ]
        title = f"### {where}: answers of {part['reader']}, to {part['questions']} test questions"
        yield f"{title}\n\n{markdown(HEADER, rows)}"


def _cells(
    title: str,
    matched: Interval | None,
    runs: Sequence[np.ndarray],
    bounds: Mapping[str, np.ndarray],
) -> list[str]:
    gain = None if title == NOTHING else difference(runs, [bounds[NOTHING]])
    missed = None if title == GOLD else difference([bounds[GOLD]], runs)
    told = [interval_cell(matched), interval_cell(interval(runs))]
    return [title, *told, *(interval_cell(each, sign=True) for each in (gain, missed))]

"""Tables of the suite which: what a reader answers that has read what each row found.

The readers are the script, to all test questions, and a language model where it was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import markdown
from benchmarks.which_cases.answers import GOLD, NOTHING
from benchmarks.which_cases.found import READ, Asking, Found
from benchmarks.which_cases.scores import (
    SPAN_EM,
    SPAN_F1,
    Interval,
    columns,
    difference,
    interval,
)
from benchmarks.which_cases.settings import SETTINGS, Setting
from benchmarks.which_cases.table import Scored, interval_cell, is_compared, score_of

_SIMPLE = "bm25"  # the row that all others are compared with


class _Reader(NamedTuple):
    """Names of its columns, and its scores with the gold passages and with none."""

    em: str
    f1: str
    bounds: Mapping[str, Mapping[str, np.ndarray]]


def tables(
    lines: Sequence[Scored],
    parts: Mapping[str, Mapping[str, Any]],
    settings: Callable[[str], Setting],
) -> Iterator[str]:
    """A section in Markdown for each setting and reader.

    Args:
        lines: of all settings, with their columns of answers.
        parts: SETTING/answers → its result.
        settings: gives a setting by its name.
    """
    for where in SETTINGS:
        own = [line for line in lines if line.trained_in == where and is_compared(line)]
        if not own:
            continue
        given = settings(where)
        title = f"### {where}: answers by script, to {len(given.test)} test questions"
        yield f"{title}\n\n{_table(own, _script(given))}"
    for name, part in parts.items():
        where = name.partition("/")[0]
        own = [line for line in lines if line.trained_in == where]
        em, f1 = f"em@{READ}", f"f1@{READ}"
        bounds = {
            read: {column: np.array(values, float) for column, values in made.items()}
            for read, made in part["bounds"].items()
        }
        title = f"### {where}: answers of {part['reader']}, to {part['questions']} test questions"
        yield f"{title}\n\n{_table(own, _Reader(em, f1, bounds))}"


def _script(given: Setting) -> _Reader:
    lists = {GOLD: {each.id: each.gold for each in given.test}}
    lists[NOTHING] = {each.id: () for each in given.test}
    bounds = {name: columns(given, Found(each, Asking())) for name, each in lists.items()}
    return _Reader(SPAN_EM, SPAN_F1, bounds)


def _table(lines: Sequence[Scored], reader: _Reader) -> str:
    bounds = {name: made[reader.f1] for name, made in reader.bounds.items()}
    simple = next((line for line in lines if line.row.name == _SIMPLE), None)

    def cells(title: str, matched: Interval | None, runs: Sequence[np.ndarray]) -> list[str]:
        other = None if simple is None or title == simple.title else simple.column(reader.f1)
        differences = (
            None if title == NOTHING else difference(runs, [bounds[NOTHING]]),
            None if title == GOLD else difference([bounds[GOLD]], runs),
            difference(runs, other) if other else None,
        )
        told = [interval_cell(matched), interval_cell(interval(runs))]
        return [title, *told, *(interval_cell(each, sign=True) for each in differences)]

    rows = [
        cells(read, interval([made[reader.em]]), [made[reader.f1]])
        for read, made in reader.bounds.items()
    ]
    rows += [
        cells(line.title, score_of(line, reader.em), runs)
        for line in lines
        if (runs := line.column(reader.f1))
    ]
    f1 = reader.f1
    header = ["what is read", reader.em, f1, f"{f1} less that of {NOTHING}", f"{GOLD} less it"]
    return markdown([*header, "it less BM25"], rows)

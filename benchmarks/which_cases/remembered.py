"""How much of what is wrongly read are gold passages of training questions.

A retriever that learns "this passage is good" instead of "it is good for this question" reads
them for other questions, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from benchmarks.report import markdown
from benchmarks.which_cases.found import READ
from benchmarks.which_cases.row import TRAINED
from benchmarks.which_cases.settings import SETTINGS, TRAIN, Setting
from benchmarks.which_cases.table import Scored, cost_cell, is_compared


def share(line: Scored, given: Setting, remembered: Collection[str]) -> float | None:
    """Of the passages within the first 4 that are not gold for their question; None: there is none.

    Args:
        line: of all its trainings together.
        given: the setting that it is tested in.
        remembered: gold passages of its training questions.
    """
    gold = {asked.id: {*asked.gold} for asked in given.test}
    wrong = [
        name
        for found in line.found.get(given.name, [])
        for question, names in found.lists.items()
        for name in names[:READ]
        if name not in gold[question]
    ]
    return sum(name in remembered for name in wrong) / len(wrong) if wrong else None


def tables(lines: Sequence[Scored], settings: Callable[[str], Setting]) -> Iterator[str]:
    """A section in Markdown for each setting with lines."""
    for where in SETTINGS:
        own = [line for line in lines if line.trained_in == where and _is_told(line)]
        if not own:
            continue
        given = settings(where)
        remembered = {name for asked in given.questions[TRAIN] for name in asked.gold}
        shares = [(line, share(line, given, remembered)) for line in own]
        rows = [[line.title, cost_cell([100 * each])] for line, each in shares if each is not None]
        yield (
            f"### {where}: what is wrongly read\n\n"
            f"Gold passages of training questions are {len(remembered):,} of {len(given.corpus):,} "
            f"passages ({100 * len(remembered) / len(given.corpus):.0f} %). The column has their "
            f"percentage among the passages that are read in the first {READ} and are not gold for "
            "their question.\n\n" + markdown(["row", "of training questions, %"], rows)
        )


def _is_told(line: Scored) -> bool:
    return is_compared(line) or not line.way.startswith(TRAINED)

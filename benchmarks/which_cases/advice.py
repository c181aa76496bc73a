"""What to use when: under each condition the line that finds most, and what is not told apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.report import markdown
from benchmarks.which_cases.row import TRAINED
from benchmarks.which_cases.rows import GOLD
from benchmarks.which_cases.settings import SETTINGS
from benchmarks.which_cases.table import (
    COMPARED,
    Scored,
    cost_cell,
    difference_of,
    interval_cell,
    score_of,
)

Allowed = Callable[[Scored], bool]


def writes(line: Scored) -> bool:
    """Whether a language model writes something for a question."""
    return any(each.asking.written_tokens > 0 for each in line.found[line.trained_in])


def milliseconds(line: Scored) -> float | None:
    """Mean over the trainings; None: not known."""
    times = [each.asking.milliseconds for each in line.found[line.trained_in]]
    known = [each for each in times if each is not None]
    return statistics.mean(known) if known else None


def _untrained(line: Scored) -> bool:
    return not line.way.startswith(TRAINED) and not line.row.in_use and not line.training


def _by_gold(line: Scored) -> bool:
    return _untrained(line) or (line.row.told == GOLD and not line.row.in_use)


def _within(limit: float) -> Allowed:
    def allowed(line: Scored) -> bool:
        taken = milliseconds(line)
        return not line.row.in_use and taken is not None and taken <= limit

    return allowed


# Milliseconds between the times of searches, so that a machine of half the speed gives one advice.
BUDGETS = (2, 5, 30, 200)
CONDITIONS: tuple[tuple[str, Allowed], ...] = (
    ("no labels, no language model", lambda line: _untrained(line) and not writes(line)),
    ("no labels, a language model", _untrained),
    ("gold passages, no language model", lambda line: _by_gold(line) and not writes(line)),
    ("gold passages, a language model", _by_gold),
    ("gold passages and answers", lambda line: not line.row.in_use),
    ("an agent that knows sub-questions and answers", lambda line: True),
    *((f"at most {limit} ms a question", _within(limit)) for limit in BUDGETS),
)


def tables(lines: Sequence[Scored]) -> list[str]:
    """A section in Markdown for each setting that has lines."""
    made = []
    for where in SETTINGS:
        if own := [line for line in lines if line.trained_in == where]:
            made.append(f"### {where}: what to use when\n\n{advice(own)}")
    return made


def advice(lines: Sequence[Scored]) -> str:
    """The best line of each condition by the mean, among those of one setting that are finished."""
    rows = []
    for condition, allowed in CONDITIONS:
        scores = [(line, score_of(line, COMPARED)) for line in lines if allowed(line)]
        known = [(line, score) for line, score in scores if score is not None]
        if not known:
            continue
        best, score = max(known, key=lambda pair: pair[1].mean)
        alike = []
        for other, _ in known:
            found = difference_of(best, other)
            if other is not best and (found is None or not found.is_away):
                alike.append(f"{other.title} ({cost_cell([milliseconds(other)])} ms)")
        rows.append(
            [
                condition,
                best.title,
                interval_cell(score),
                cost_cell([milliseconds(best)]),
                cost_cell([cost.cpu_minutes for cost in best.training]),
                "; ".join(alike) or "none",
            ]
        )
    header = ["you have", "finds most", COMPARED, "ms a question", "training, CPU minutes"]
    return markdown([*header, "not told apart from it (ms a question)"], rows)

"""Compares the settings of a sweep: means over seeds, intervals, paired differences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qrag_jax.errors import InputError
from qrag_jax.metrics.bootstrap import crossed_interval, interval_text
from qrag_jax.runtime import whole_files
from qrag_jax.systems.sweep_plan import Plan, PlannedRun
from qrag_jax.systems.sweep_runs import DONE, SweepFolder
from qrag_jax.systems.sweep_scores import scores_of

MARKDOWN, JSON = "table.md", "table.json"

Questions = Mapping[str, float]  # a score of each question, by its id


@dataclasses.dataclass(frozen=True)
class Scored:
    """What the runs of a sweep scored.

    Attributes:
        score: its name.
        settings: all combinations, in the plan's order.
        runs: by the settings and then by the seed; only those that are scored.
        missing: why each other run is not, by its name.
    """

    score: str
    settings: Sequence[str]
    runs: Mapping[str, Mapping[int, Questions]]
    missing: Mapping[str, str]


def scored(plan: Plan, folder: SweepFolder, score: str = "") -> Scored:
    """Reads the scores of the runs that are done.

    Args:
        score: which one; "": the one that sums up a run of the system.

    Raises:
        InputError: no run has the score, or a log cannot be read.
    """
    runs: dict[str, dict[int, Questions]] = {}
    missing: dict[str, str] = {}
    planned = plan.runs()
    for run in planned:
        if why := _why_missing(run, folder):
            missing[run.name] = why
            continue
        found = scores_of(folder.run(run))
        score = score or found.main
        if not found.scores.get(score):
            raise InputError(
                f"--score={score} is no score of {run.name}; use one of "
                f"{', '.join(name for name, own in found.scores.items() if own)}."
            )
        runs.setdefault(run.settings, {})[run.seed] = found.scores[score]
    settings = [*dict.fromkeys(run.settings for run in planned)]
    return Scored(score, settings, runs, missing)


def compared(given: Scored) -> dict[str, Any]:
    """The table as plain values.

    Returns:
        `score`; `settings`, a row for each combination with `seeds`, `questions` (scored in each of
        these seeds), `by_seed` (means), `mean`, `low`, `high`, and `difference` to the first
        combination on the questions and seeds of both; and `not_scored`, run → reason.
    """
    first = given.runs.get(given.settings[0], {})
    rows = []
    for settings in given.settings:
        own = given.runs.get(settings, {})
        row: dict[str, Any] = {"settings": settings, "seeds": [*own]}
        if own:
            values, questions = _values(own, [*own])
            row |= {"questions": len(questions)}
            row["by_seed"] = {
                str(seed): float(np.mean([*scores.values()])) for seed, scores in own.items()
            }
            row |= _interval(values)
        seeds = [seed for seed in own if seed in first]
        if settings != given.settings[0] and seeds:
            common = {seed: _common(own[seed], first[seed]) for seed in seeds}
            values, questions = _values(common, seeds)
            if questions:
                row["difference"] = {"seeds": seeds, "questions": len(questions)}
                row["difference"] |= _interval(values)
        rows.append(row)
    return {"score": given.score, "settings": rows, "not_scored": dict(given.missing)}


def markdown(plan: Plan, table: Mapping[str, Any]) -> str:
    """The table for people, in Markdown."""
    score, rows = table["score"] or "no score yet", table["settings"]
    lines = [
        f"# Sweep of {plan.config}",
        "",
        f"| settings | seeds | questions | {score} | minus the first |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        seeds, known = ", ".join(map(str, row["seeds"])), "mean" in row
        difference = row.get("difference")
        cells = [
            _escaped(row["settings"]),
            seeds or "none",
            str(row["questions"]) if known else "",
            interval_text(row) if known else "",
            interval_text(difference, sign=True) if difference else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", _about(rows)]
    if missing := table["not_scored"]:
        lines += ["", "Not scored, and not counted as 0:", ""]
        lines += [f"- {name}: {_escaped(why)}" for name, why in missing.items()]
    return "\n".join(lines) + "\n"


def write(folder: Path, plan: Plan, table: Mapping[str, Any]) -> str:
    """Writes `table.md` and `table.json`; returns the text of the first.

    Raises:
        OSError: they cannot be written.
    """
    text = markdown(plan, table)
    whole_files.write_whole(folder / MARKDOWN, text)
    whole_files.write_whole(folder / JSON, json.dumps(table, indent=2) + "\n")
    return text


def _about(rows: Sequence[Mapping[str, Any]]) -> str:
    text = (
        "Means over seeds, with 95 % bootstrap intervals: questions and seeds are both drawn anew. "
        "Differences are of the same questions and seeds."
    )
    if all(len(row["seeds"]) <= 1 for row in rows):
        text += " There is one seed, so the intervals say nothing of how trainings differ."
    return text


def _why_missing(run: PlannedRun, folder: SweepFolder) -> str:
    state = folder.state(run)
    if state is None:
        return "not finished" if folder.run(run).exists() else "not begun"
    return "" if state.status == DONE else state.told


def _values(
    runs: Mapping[int, Questions], seeds: Sequence[int]
) -> tuple[NDArray[np.float64], list[str]]:
    """`[seeds, questions]` and the ids of the questions, those that each of the seeds has."""
    first, *others = (runs[seed] for seed in seeds)
    questions = [name for name in first if all(name in other for other in others)]
    return np.array([[runs[seed][name] for name in questions] for seed in seeds]), questions


def _common(one: Questions, other: Questions) -> dict[str, float]:
    return {name: value - other[name] for name, value in one.items() if name in other}


def _interval(values: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), crossed_interval(values), strict=True))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")

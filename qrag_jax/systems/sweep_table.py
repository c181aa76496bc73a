"""Compares the settings of a sweep: means over seeds, intervals, paired differences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_log, run_page
from qrag_jax.evaluators.episode_views import AGENTS, CHUNKS, HOPS, REWRITES, TOKENS
from qrag_jax.metrics import agent_log, hop_log, prediction_scores, predictions, retrieval_log, trec
from qrag_jax.metrics.bootstrap import crossed_interval, interval_text
from qrag_jax.metrics.facts import score_columns
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.runtime import whole_files
from qrag_jax.runtime.config_fields import refusing_types
from qrag_jax.runtime.saved_config import CONFIG_NAME, read_fields
from qrag_jax.systems.sweep_plan import Plan, missing

Scores = dict[str, dict[str, float]]  # by the score's name, then by the question's id
OF_AGENTS = ("f1", "em", "recall")
OF_TOKENS = ("f1", "em", "recall", "reward")


@dataclasses.dataclass(frozen=True)
class RunScores:
    """What a run scored.

    Attributes:
        main: the score that sums it up.
        scores: all there are; a question whose episode failed has none.
    """

    main: str
    scores: Scores


def scores_of(workdir: Path) -> RunScores:
    """The scores of the newest evaluation of a run."""
    log = run_page.newest_log(workdir)
    if log is None:
        raise InputError(f"{workdir} has no log of an evaluation; score it with qrag evaluate.")
    found = _READERS[str(run_page.kind_of(log))](log)
    if not found.scores.get(found.main):
        raise InputError(f"{log} has no question with {found.main}; look at its log.")
    return found


def _of_chunks(path: Path) -> RunScores:
    """Facts are those of all chunks taken; where no question has any, `answer_found`."""
    rows = retrieval_log.read_partial(path)
    found: Scores = {}
    for row in rows:
        for name, (value,) in score_columns([row]).items():
            found.setdefault(name, {})[row.id] = value
    return RunScores("fact_f1" if "fact_f1" in found else "answer_found", found)


def _of_agents(path: Path) -> RunScores:
    rows = [row for row in agent_log.read_partial(path) if not row.failed]
    return RunScores("f1", {name: _column(rows, name) for name in OF_AGENTS})


def _of_tokens(path: Path) -> RunScores:
    questions = prediction_scores.by_question(predictions.read_scores(path))
    by_id = prediction_scores.columns_of(questions)
    found = {name: {key: own[name] for key, own in by_id.items()} for name in OF_TOKENS}
    return RunScores("f1", found)


def _of_hops(path: Path) -> RunScores:
    """Scores after the last hop."""
    found: Scores = {}
    for row in (each for each in hop_log.read(path) if not each.failed):
        for name, value in row.hops[-1].scores.items():
            found.setdefault(name, {})[row.id] = value
    return RunScores("all_gold", found)


def _of_rewrites(path: Path) -> RunScores:
    """The measures of the run's config, by the judgements that its evaluation wrote."""
    from qrag_jax.systems.deepretrieval_scoring import QRELS, RUNS
    from qrag_jax.systems.rewrite_search import OWN

    of_run = path.parent.parent / CONFIG_NAME
    with refusing_types(of_run):
        config = read_fields(of_run)["eval"]
        measures, best_by = tuple(config["measures"]), str(config["best_by"])
    found: Scores = {}
    own: dict[str, dict[str, Sequence[str]]] = {}
    for row in rewrite_log.read(path):
        if not row.failed:
            own.setdefault(row.collection, {})[row.id] = row.ranking
    for collection, rankings in own.items():
        qrels = trec.read_qrels(path.parent / RUNS / (collection or OWN) / QRELS)
        qrels = {name: qrels[name] for name in rankings if name in qrels}
        for measure, column in ranking_columns(rankings, qrels, measures).items():
            named = {f"{collection}/{name}": value for name, value in column.items()}
            found.setdefault(measure, {}).update(named)
    return RunScores(best_by, found)


_READERS: dict[str, Callable[[Path], RunScores]] = {
    CHUNKS: _of_chunks,
    AGENTS: _of_agents,
    TOKENS: _of_tokens,
    HOPS: _of_hops,
    REWRITES: _of_rewrites,
}


def _column(rows: Sequence[Any], name: str) -> dict[str, float]:
    found = {row.id: getattr(row, name) for row in rows}
    return {key: value for key, value in found.items() if value is not None}


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


def scored(plan: Plan, folder: Path, score: str = "") -> Scored:
    """Reads the scores of the runs that are done.

    Args:
        score: which one; "": the one that sums up a run of the system.
    """
    runs: dict[str, dict[int, Questions]] = {}
    why_not: dict[str, str] = {}
    planned = plan.runs()
    for run in planned:
        if why := missing(run, folder):
            why_not[run.name] = why
            continue
        found = scores_of(folder / run.name)
        score = score or found.main
        if not found.scores.get(score):
            raise InputError(
                f"--score={score} is no score of {run.name}; use one of "
                f"{', '.join(name for name, own in found.scores.items() if own)}."
            )
        runs.setdefault(run.settings, {})[run.seed] = found.scores[score]
    settings = [*dict.fromkeys(run.settings for run in planned)]
    return Scored(score, settings, runs, why_not)


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
    if unscored := table["not_scored"]:
        lines += ["", "Not scored, and not counted as 0:", ""]
        lines += [f"- {name}: {_escaped(why)}" for name, why in unscored.items()]
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

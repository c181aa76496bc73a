"""A sweep: one experiment, trained with every seed and every combination of settings.

Each run is trained and scored by the commands `train` and `evaluate`. Its folder says how far it
is: with the summary of its evaluation it is done.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.evaluators import run_page
from qrag_jax.metrics import prediction_scores, trec
from qrag_jax.metrics.bootstrap import crossed_interval, interval_text
from qrag_jax.metrics.facts import score_columns
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.metrics.rows import AGENTS, HOPS, PREDICTIONS, RETRIEVALS, REWRITES, scored_episodes
from qrag_jax.runtime import bounded_json, typed_json, whole_files
from qrag_jax.runtime.config_fields import refusing_types
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.runtime.saved_config import CONFIG_NAME, read_fields
from qrag_jax.systems import run_flags

NAME = "sweep.json"
MOST_RUNS = 1000
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_OPEN, _CLOSED = "([{", ")]}"
_BASE = "base"  # the name of the combination in which nothing is varied
_LONGEST = 80  # characters of a folder's name, without the seed
_SUMMARIES = ("summary.json", "eval/summary.json")  # of Q-RAG; of the other systems
_TURN = 0.2  # seconds between looks at a command and at the signals
_TAIL = 65536  # bytes of a log in which its last line is looked for
_SHOWN = 300  # characters of that line


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One training with its scores.

    Attributes:
        name: of its folder.
        settings: what people call its combination of settings.
        seed: of the training.
        values: the text of each field that is set.
    """

    name: str
    settings: str
    seed: int
    values: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All runs of a sweep.

    Attributes:
        config: FILE or FILE:VARIANT of the experiment.
        seeds: of the trainings.
        sets: field → the values it takes, as texts.
        samples: questions of the evaluation; 0: all.
        checkpoint: which one is scored; "": the command's own choice.
    """

    config: str
    seeds: tuple[int, ...]
    sets: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    samples: int = 0
    checkpoint: str = ""

    def runs(self) -> list[PlannedRun]:
        """The runs, the seeds of a combination one after the other."""
        varied = [field for field, values in self.sets.items() if len(values) > 1]
        found, names = list[PlannedRun](), set[str]()
        for chosen in itertools.product(*self.sets.values()):
            values = tuple(zip(self.sets, chosen, strict=True))
            told = {field: value for field, value in values if field in varied}
            name = _unused(_folder(told), names)
            settings = ", ".join(f"{field}={value}" for field, value in told.items()) or _BASE
            found += [
                PlannedRun(f"{name}-seed{seed}", settings, seed, values) for seed in self.seeds
            ]
        return found

    def words(self, run: PlannedRun) -> list[str]:
        """The trainer's flags of a run, but for its folder."""
        fields = [f"--config.{field}={value}" for field, value in run.values]
        return [f"--config={self.config}", f"--config.seed={run.seed}", *fields]

    def commands(self, run: PlannedRun, folder: Path) -> list[list[str]]:
        """The words of the two commands of a run, in a sweep's folder."""
        where = f"--workdir={folder / run.name}"
        checkpoint = [f"--checkpoint={self.checkpoint}"] if self.checkpoint else []
        return [
            [sys.executable, "-m", "qrag_jax.train", *self.words(run), where],
            [
                *(sys.executable, "-m", "qrag_jax.evaluate", where),
                *(f"--samples={self.samples}", *checkpoint),
            ],
        ]

    def line(self, run: PlannedRun, folder: Path) -> str:
        """Both commands of a run as a line for a shell."""
        return " && ".join(map(shlex.join, self.commands(run, folder)))

    def check(self) -> None:
        """Refuses values that no training could use, before any of them starts."""
        runs = self.runs()
        if len(runs) > MOST_RUNS:
            raise InputError(f"--set and --seeds make {len(runs)} runs; at most are {MOST_RUNS}.")
        for run in runs:
            if run.seed != self.seeds[0]:
                continue
            try:
                systems.check(run_flags.experiment_of(self.words(run)))
            except InputError as error:
                raise InputError(f"{run.settings}: {error}") from None

    def write(self, folder: Path) -> None:
        """Keeps the plan in the sweep's folder, which is made."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        whole_files.write_whole(folder / NAME, text)

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """That of a sweep's folder."""
        path = folder / NAME
        try:
            return typed_json.made(cls, bounded_json.load(path))
        except FileNotFoundError:
            raise InputError(
                f"{path} does not exist; give the folder of a sweep, or --config to begin one."
            ) from None

    def refuse_other(self, kept: Plan, folder: Path) -> None:
        """Refuses to go on with another plan than the folder's."""
        for name, ours in dataclasses.asdict(self).items():
            theirs = getattr(kept, name)
            if ours != theirs:
                raise InputError(
                    f"{folder / NAME} has another plan ({name}: {_shown(theirs)} there, "
                    f"{_shown(ours)} given); leave the flags out to go on with it, or give "
                    "another --out."
                )


def missing(run: PlannedRun, folder: Path) -> str:
    """Why a run is not done: with the last line that its commands wrote; "": it is done."""
    workdir = folder / run.name
    if any((workdir / name).exists() for name in _SUMMARIES):
        return ""
    if not (log_path := folder / f"{run.name}.log").exists():
        return "not finished" if workdir.exists() else "not begun"
    return f"not finished: {_last_line(log_path)}"


def run_all(plan: Plan, folder: Path, stop: StopSignal) -> None:
    """Does the runs that are not done, one after the other; those that failed are tried again."""
    for run in plan.runs():
        stop.check()
        if not missing(run, folder):
            log(f"{run.name}: done already")
            continue
        for words in plan.commands(run, folder):
            command = words[2].rpartition(".")[2]
            log(f"{run.name}: {command}")
            status = _done(words, folder / f"{run.name}.log", stop)
            stop.check()
            if status:
                log(f"{run.name}: {command} failed with {status}; {missing(run, folder)}")
                break


def _done(words: Sequence[str], log_path: Path, stop: StopSignal) -> int:
    """Runs a command to its end; returns its status.

    A stop is passed on once, as SIGTERM: the command saves and ends.
    """
    with log_path.open("ab") as file:
        process = subprocess.Popen(  # noqa: S603  a list of arguments, no shell
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
        )
        passed_on = False
        while True:
            try:
                return process.wait(_TURN)
            except subprocess.TimeoutExpired:
                if stop.requested and not passed_on:
                    passed_on = True
                    process.send_signal(signal.SIGTERM)


def _last_line(path: Path) -> str:
    """The last error, or else the last line, of a log."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    found = [*lines[-1:], *errors[-1:]]
    return found[-1][:_SHOWN] if found else "it wrote nothing"


def sets_of(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The fields and values of `FIELD=V1,V2`; commas inside of brackets and quotes part nothing."""
    found: dict[str, tuple[str, ...]] = {}
    for each in given:
        field, equals, text = each.partition("=")
        field = field.removeprefix("config.")
        if not equals or not _FIELD.fullmatch(field):
            raise InputError(f"--set={each} is not of the form FIELD=VALUE,VALUE.")
        if field == "seed":
            raise InputError(f"--set={each} sets the seed; give --seeds in its place.")
        if field in found:
            raise InputError(f"--set={each} gives the values of {field} again; give it once.")
        values = _parted(text)
        if len({*values}) < len(values):
            raise InputError(f"--set={each} has a value twice; give each once.")
        found[field] = values
    return found


def seeds_of(given: Sequence[str]) -> tuple[int, ...]:
    """The numbers of `--seeds`."""
    if not given or not all(re.fullmatch(r"[0-9]{1,10}", each) for each in given):
        raise InputError(f"--seeds={','.join(given)} is no list of whole numbers, such as 42,43.")
    seeds = tuple(int(each) for each in given)
    if len({*seeds}) < len(seeds) or max(seeds) >= 2**32:
        raise InputError(f"--seeds={','.join(given)} must be different numbers below 2³².")
    return seeds


def _parted(text: str) -> tuple[str, ...]:
    parts, depth, quote = [""], 0, ""
    for mark in text:
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        else:
            depth += (mark in _OPEN) - (mark in _CLOSED)
        if mark == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += mark
    return tuple(parts)


def _folder(values: dict[str, str]) -> str:
    """A name for people: the last word of each field, and its value."""
    parts = [f"{field.rpartition('.')[2]}-{value}" for field, value in values.items()]
    name = re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(parts)).strip("._-")[:_LONGEST]
    return name or _BASE


def _unused(name: str, names: set[str]) -> str:
    number, found = 1, name
    while found in names:
        number += 1
        found = f"{name}-{number}"
    names.add(found)
    return found


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{k}={','.join(v)}" for k, v in value.items()) or "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return repr(value)


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
    rows = RETRIEVALS.read_partial(path)
    found: Scores = {}
    for row in rows:
        for name, (value,) in score_columns([row]).items():
            found.setdefault(name, {})[row.id] = value
    return RunScores("fact_f1" if "fact_f1" in found else "answer_found", found)


def _of_agents(path: Path) -> RunScores:
    rows = [row for row in AGENTS.read_partial(path) if not row.failed]
    return RunScores("f1", {name: _column(rows, name) for name in OF_AGENTS})


def _of_tokens(path: Path) -> RunScores:
    questions = prediction_scores.by_question(scored_episodes(path))
    by_id = prediction_scores.columns_of(questions)
    found = {name: {key: own[name] for key, own in by_id.items()} for name in OF_TOKENS}
    return RunScores("f1", found)


def _of_hops(path: Path) -> RunScores:
    """Scores after the last hop."""
    found: Scores = {}
    for row in (each for each in HOPS.read(path) if not each.failed):
        for name, value in row.hops[-1].scores.items():
            found.setdefault(name, {})[row.id] = value
    return RunScores("all_gold", found)


def _of_rewrites(path: Path) -> RunScores:
    """The measures of the run's config, by the judgements that its evaluation wrote."""
    from qrag_jax.systems.deepretrieval_scoring import QRELS, RUNS
    from qrag_jax.systems.query_search import OWN

    of_run = path.parent.parent / CONFIG_NAME
    with refusing_types(of_run):
        config = read_fields(of_run)["eval"]
        measures, best_by = tuple(config["measures"]), str(config["best_by"])
    found: Scores = {}
    own: dict[str, dict[str, Sequence[str]]] = {}
    for row in REWRITES.read(path):
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
    RETRIEVALS.name: _of_chunks,
    AGENTS.name: _of_agents,
    PREDICTIONS.name: _of_tokens,
    HOPS.name: _of_hops,
    REWRITES.name: _of_rewrites,
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
    """Writes `table.md` and `table.json`; returns the text of the first."""
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

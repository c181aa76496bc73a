"""Trains and scores one experiment with several seeds and settings, and compares them.

    qrag sweep --config=configs/quickstart.py --out=runs/rates --seeds=42,43,44 \\
        --set=optimizer.learning_rate=1e-5,3e-5
    qrag sweep --out=runs/rates --table

Every combination of the values of --set is trained with every seed, one run after the other, by the
commands `train` and `evaluate`. A run is done when its folder has the summary of its evaluation.
Give the same command again, or only --out, to go on with a sweep that was stopped: finished runs
stay as they are, and a run that was broken off goes on from its last checkpoint. --table writes the
table of the runs that are done, and runs nothing.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.evaluators import evaluation
from qrag_jax.metrics import facts, summaries
from qrag_jax.metrics import row_log as logs
from qrag_jax.metrics.bootstrap import crossed_interval, interval_text, named
from qrag_jax.runtime import commandline, interrupt
from qrag_jax.runtime.config_fields import CONFIG_NAME, read_fields
from qrag_jax.runtime.run import log
from qrag_jax.runtime.whole_files import write_json, write_whole, writing
from qrag_jax.systems import run_flags, scoring

_OF_PLAN = ("config", "seeds", "set", "samples", "checkpoint")
Questions = Mapping[str, float]  # a score of each question, by its id
# One value of a list: commas inside of brackets and quotes part nothing.
_VALUE = re.compile(r"""(?:\([^)]*\)|\[[^\]]*\]|'[^']*'|"[^"]*"|[^,])+""")
_FIELD = re.compile(r"(?:config\.)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(.*)", re.DOTALL)


CONFIG = flags.DEFINE_string("config", "", "Experiment, FILE or FILE:VARIANT.")
OUT = flags.DEFINE_string("out", "", "Folder of the sweep.")
SEEDS = flags.DEFINE_list("seeds", ["42"], "Seeds of the trainings, with commas between them.")
SET = flags.DEFINE_multi_string(
    "set", [], "FIELD=VALUE,VALUE of the experiment; may be given several times."
)
SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to score, 0 for all.", lower_bound=0)
CHECKPOINT = flags.DEFINE_enum(
    "checkpoint", "", ["", "best", "last"], "Scored checkpoint; default: the command's."
)
SCORE = flags.DEFINE_string("score", "", "Score of the table; default: that of the system.")
TABLE = flags.DEFINE_bool("table", False, "Only write the table.")


def main() -> int:
    if not OUT.value:
        raise InputError("give the folder of the sweep, for example --out=runs/sweep.")
    folder = Path(OUT.value)
    plan = _plan(folder)
    with writing(folder, "--out"):
        if not TABLE.value:
            with interrupt.StopSignal() as stop:
                status = scoring.resumable(lambda: run_all(plan, folder, stop), "what is finished")
            if status:
                return status
        table = scored(plan, folder, SCORE.value)
        text = markdown(plan, table)
        write_whole(folder / "table.md", text)
        write_json(folder / "table.json", table)
    print(f"{text}\n{folder / 'table.md'}, {folder / 'table.json'}")
    return int(bool(table["not_scored"]) and not TABLE.value)


def _plan(folder: Path) -> Plan:
    """The plan of the folder; one of the flags begins it, or must be the same."""
    path = folder / "sweep.json"
    kept = Plan(**json.loads(path.read_text())) if path.exists() else None
    if kept and not any(flags.FLAGS[name].present for name in _OF_PLAN):
        return kept
    if not CONFIG.value:
        raise InputError(f"give --config=FILE to begin a sweep; there is no {path}.")
    sets = sets_of(SET.value)
    plan = Plan(CONFIG.value, seeds_of(SEEDS.value), sets, SAMPLES.value, CHECKPOINT.value)
    if kept is None:
        plan.check()
        with writing(folder, "--out"):
            write_json(path, plan._asdict())
    elif other := [name for name in plan._fields if getattr(plan, name) != getattr(kept, name)]:
        raise InputError(
            f"{path} has another plan ({', '.join(other)}); leave these out, or give another --out."
        )
    return plan


# ---------------------------------------------------------------- the plan


class PlannedRun(NamedTuple):
    name: str  # of its folder
    settings: str  # for people
    seed: int
    words: list[str]  # the flags of its training


class Plan(NamedTuple):
    """All runs of a sweep: the experiment, seeds, field → its values as texts, the evaluation."""

    config: str
    seeds: list[int]
    sets: dict[str, list[str]]
    samples: int = 0
    checkpoint: str = ""

    def runs(self) -> list[PlannedRun]:
        """The runs, the seeds of a combination one after the other."""
        runs, names = list[PlannedRun](), list[str]()
        for chosen in itertools.product(*self.sets.values()):
            values = dict(zip(self.sets, chosen, strict=True))
            varied = {field: values[field] for field in values if len(self.sets[field]) > 1}
            parts = [f"{field.rpartition('.')[2]}-{value}" for field, value in varied.items()]
            name = re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(parts)).strip("._-")[:80] or "base"
            names.append(name if name not in names else f"{name}-{len(names) + 1}")
            settings = ", ".join(f"{field}={value}" for field, value in varied.items()) or "base"
            fields = [f"--config.{field}={value}" for field, value in values.items()]
            for seed in self.seeds:
                words = [f"--config={self.config}", f"--config.seed={seed}", *fields]
                runs.append(PlannedRun(f"{names[-1]}-seed{seed}", settings, seed, words))
        return runs

    def check(self) -> None:
        """Refuses values that no training could use, before any of them starts."""
        for run in self._replace(seeds=self.seeds[:1]).runs():
            try:
                systems.check(run_flags.experiment_of(run.words))
            except InputError as error:
                raise InputError(f"{run.settings}: {error}") from None


def seeds_of(words: Sequence[str]) -> list[int]:
    seeds = [int(word) for word in words if re.fullmatch(r"[0-9]{1,10}", word)]
    if not seeds or len({*seeds}) < len(words) or max(seeds) >= 2**32:
        raise InputError(f"--seeds={','.join(words)} must be different whole numbers below 2³².")
    return seeds


def sets_of(words: Sequence[str]) -> dict[str, list[str]]:
    sets: dict[str, list[str]] = {}
    for word in words:
        parts = _FIELD.fullmatch(word)
        values = (_VALUE.findall(parts[2]) or [""]) if parts else []
        if parts is None or parts[1] in {*sets, "seed"} or len({*values}) < len(values):
            raise InputError(f"--set={word} must be FIELD=VALUE,VALUE, each once; seeds: --seeds.")
        sets[parts[1]] = values
    return sets


def missing(run: PlannedRun, folder: Path) -> str:
    """Why a run is not done, with the last line that its commands wrote; "": it is done."""
    if (folder / run.name / "eval" / scoring.SUMMARY).exists():
        return ""
    path = folder / f"{run.name}.log"
    if not path.exists():
        return "not begun"
    lines = re.split(r"[\r\n]+", path.read_text(errors="replace").strip())
    errors = [line for line in lines if line.startswith("error: ")]
    return f"not finished: {[*lines[-1:], *errors[-1:]][-1][:300]}"


def run_all(plan: Plan, folder: Path, stop: interrupt.StopSignal) -> None:
    """Does the runs that are not done, one after the other; those that failed are tried again."""
    scored = [f"--samples={plan.samples}"]
    scored += [f"--checkpoint={plan.checkpoint}"] if plan.checkpoint else []
    for run in plan.runs():
        stop.check()
        if not missing(run, folder):
            log(f"{run.name}: done already")
            continue
        for command, words in (("train", run.words), ("evaluate", scored)):
            log(f"{run.name}: {command}")
            words = ["-m", f"qrag_jax.{command}", f"--workdir={folder / run.name}", *words]
            status = _status([sys.executable, *words], folder / f"{run.name}.log", stop)
            stop.check()
            if status:
                log(f"{run.name}: {command} failed with {status}; {missing(run, folder)}")
                break


def _status(words: Sequence[str], log_path: Path, stop: interrupt.StopSignal) -> int:
    """Runs a command to its end. A stop is passed on once, as SIGTERM: it saves and ends."""
    with log_path.open("ab") as file:
        # In a session of its own: Ctrl-C reaches this process alone, which passes it on.
        process = subprocess.Popen(  # noqa: S603  a list of arguments, no shell
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        while not stop.requested:
            try:
                return process.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
        process.send_signal(signal.SIGTERM)
        return process.wait()


# ---------------------------------------------------------------- the scores of a run

_MAIN = {logs.HOPS.name: "all_gold", logs.RETRIEVALS.name: "fact_f1"}  # of other logs it is f1


def main_score(path: Path, workdir: Path, questions: Mapping[str, Questions]) -> str:
    """The score that sums a run up, of a log with these scores of its questions."""
    kind = str(evaluation.kind_of(path))
    if kind == logs.REWRITES.name:
        return read_fields(workdir / CONFIG_NAME)["eval"]["best_by"]
    if kind == logs.RETRIEVALS.name and not any("fact_f1" in q for q in questions.values()):
        return "answer_found"
    return _MAIN.get(kind, "f1")


def question_scores(path: Path, workdir: Path) -> dict[str, dict[str, float]]:
    """The scores of each question in a log of a run: id → name → value.

    A question whose episode failed has none. Scores of hops are also by the number of the hop,
    such as hop1/recall. Ids of rewrites are COLLECTION/ID.
    """
    kind = evaluation.kind_of(path)
    if kind == logs.PREDICTIONS.name:
        return summaries.question_columns(summaries.by_question(logs.scored_episodes(path)))
    if kind == logs.REWRITES.name:
        return _rewrites(path, read_fields(workdir / CONFIG_NAME)["eval"]["measures"])
    assert kind is not None
    columns: Any = {
        logs.RETRIEVALS.name: facts.score_columns,
        logs.AGENTS.name: summaries.agent_columns,
        logs.HOPS.name: _hops,
    }
    return {
        row.id: {name: values[0] for name, values in columns[kind]([row]).items() if values}
        for row in evaluation.KINDS[kind][0].read(path)
        if not getattr(row, "failed", False)
    }


def _hops(rows: Sequence[logs.Searched]) -> dict[str, list[float]]:
    last = {name: [value] for name, value in rows[0].hops[-1].scores.items()}
    return summaries.hop_columns(rows) | last


def _rewrites(path: Path, measures: Sequence[str]) -> dict[str, dict[str, float]]:
    rows = [row for row in logs.REWRITES.read(path) if not row.failed]
    columns = summaries.measured(rows, measures).items()
    names = (f"{row.collection}/{row.id}" for row in rows)
    return {name: {m: float(column[n]) for m, column in columns} for n, name in enumerate(names)}


# ---------------------------------------------------------------- the table


def scored(plan: Plan, folder: Path, score: str = "") -> dict[str, Any]:
    runs: dict[str, dict[int, Questions]] = {run.settings: {} for run in plan.runs()}
    why_not: dict[str, str] = {}
    for run in plan.runs():
        if why := missing(run, folder):
            why_not[run.name] = why
            continue
        path = evaluation.newest_log(workdir := folder / run.name)
        assert path is not None  # its summary is there
        questions = question_scores(path, workdir)
        score = score or main_score(path, workdir, questions)
        values = {name: scores[score] for name, scores in questions.items() if score in scores}
        if not values:
            known = dict.fromkeys(name for scores in questions.values() for name in scores)
            raise InputError(f"--score={score}: {run.name} has {', '.join(known)}.")
        runs[run.settings][run.seed] = values
    return {"score": score, "settings": compared(runs), "not_scored": why_not}


def compared(runs: Mapping[str, Mapping[int, Questions]]) -> list[dict[str, Any]]:
    """The rows of the table, as plain values; `runs`: by the settings and then by the seed.

    Each has `seeds`, `questions` (scored in each of these seeds), `by_seed` (means), `mean`, `low`,
    `high`, and `difference` to the first combination on the questions and seeds of both.
    """
    first, rows = next(iter(runs.values())), list[dict[str, Any]]()
    for settings, by_seed in runs.items():
        means = {str(seed): float(np.mean([*scores.values()])) for seed, scores in by_seed.items()}
        row = {"settings": settings, **_summary(by_seed)} | ({"by_seed": means} if means else {})
        differences = {
            seed: {name: scores[name] - first[seed][name] for name in scores if name in first[seed]}
            for seed, scores in by_seed.items()
            if seed in first
        }
        if by_seed is not first and "mean" in (difference := _summary(differences)):
            row["difference"] = difference
        rows.append(row)
    return rows


def _summary(by_seed: Mapping[int, Questions]) -> dict[str, Any]:
    """Of the questions that each of the seeds has, if there are any."""
    scores = [*by_seed.values()]
    common = [name for name in scores[0] if all(name in s for s in scores)] if scores else []
    if not common:
        return {"seeds": [*by_seed]}
    values = np.array([[run[name] for name in common] for run in scores])
    return {"seeds": [*by_seed], "questions": len(common), **named(crossed_interval(values))}


def markdown(plan: Plan, table: Mapping[str, Any]) -> str:
    lines = [
        f"# Sweep of {plan.config}\n",
        f"| settings | seeds | questions | {table['score'] or 'no score yet'} | minus the first |",
        "|---|---|---|---|---|",
    ]
    for row in table["settings"]:
        cells = [
            row["settings"].replace("|", "&#124;"),
            ", ".join(map(str, row["seeds"])) or "none",
            str(row.get("questions", "")),
            interval_text(row) if "mean" in row else "",
            interval_text(row["difference"], sign=True) if "difference" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(
        "\nMeans over seeds, with 95 % bootstrap intervals: questions and seeds are both "
        "resampled. Differences are of the same questions and seeds."
    )
    if len(plan.seeds) == 1:
        lines.append("There is one seed, so the intervals say nothing of how trainings differ.")
    if table["not_scored"]:
        lines.append("\nNot scored, and not counted as 0:\n")
        lines += [f"- {name}: {why}" for name, why in table["not_scored"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    commandline.run(main)

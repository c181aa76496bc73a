"""Measures whether training helps: real trainings, scored by the user's own command.

The full suite trains MiniLM with three seeds on HotpotQA and MuSiQue records (folder QRAG_DATA,
default ../shared/data), once on the quick start, and once on HotpotQA with as many transitions as
the public code. One half of the evaluation questions selects the best checkpoint of a run, the
other half is reported. The quick start is reported on another invented world. Runs and results are
kept in runs/benchmarks/learn by version of the code: an interrupted suite resumes, and
`--only=PART` runs one part. `--quick` trains a tiny encoder on invented questions instead.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.halves import Halves, write_halves
from benchmarks.kept_runs import Kept, Part, begin_anew, command, metrics, train
from benchmarks.report import Case

SEEDS = (42, 43, 44)
DATA = Path(os.environ.get("QRAG_DATA", "../shared/data"))
SOURCES = ("hotpotqa", "musique")
RETRIEVERS = ("untrained", "single_step", "single_step_trained", "trained")
COLUMNS = (
    "untrained, multi-step",
    "untrained, one look-up",
    "trained, one look-up",
    "trained, multi-step",
)
SCORES = ("fact_em", "fact_f1", "fact_precision")
REPORTED = "reported"  # the folder of a run's scores on half 1
OTHER_WORLD = 1  # seed of the invented world that the quick start is reported on; it trains on 0

# The public PyTorch code with MiniLM, trained on train.jsonl.gz and scored on dev.jsonl.gz. No
# command here repeats this.
PUBLIC_FACT_EM, PUBLIC_TRANSITIONS, PUBLIC_RATE = 0.59, 1313, 1.5
PUBLIC_ERROR = 0.036  # standard error of its fact EM, from 189 questions
PUBLIC_ABOUT: dict[str, float | str] = {
    "public code: seeds": 1,
    "public code: questions": 189,
    "public code: standard error of fact EM": PUBLIC_ERROR,
    "public code: how": "measured once by hand on this kind of machine; no command repeats it",
}
PUBLIC = "one seed, 189 questions, standard error 0.036, measured by hand, no command"
EQUAL_STEPS = 164  # updates of 4 questions with 2 steps: 1,312 transitions


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, the cases of its finished parts."""
    kept = Kept.of("learn")
    if quick:
        return _quick_cases(begin_anew(kept.runs / "quick"))
    results = kept.finish(_parts(kept.runs), only)
    cases = all_cases(results)
    note = (
        "Means over the seeds; brackets: range over the seeds of the ends of the bootstrap 95 % "
        "intervals of fact EM."
    )
    kept.write_tables(results, note, [seed_table(results), report.cases_markdown(cases)])
    return cases


def _parts(runs: Path) -> dict[str, Part]:
    """The trainings of the full suite whose data are there, by name."""
    parts: dict[str, Part] = {"quickstart": partial(_quick_start, runs / "quickstart")}
    if (DATA / SOURCES[0]).exists():
        parts["public"] = partial(_equal_transitions, runs / "hotpotqa-public")
    for source in SOURCES:
        for seed in SEEDS if (DATA / source).exists() else ():
            parts[f"{source}-{seed}"] = partial(_seed, source, seed, runs)
    return parts


def all_cases(results: Mapping[str, Mapping[str, Any]]) -> list[Case]:
    """The cases of the parts that have results."""
    cases = []
    if "public" in results:
        cases += _equal_transitions_cases(results["public"])
    if "quickstart" in results:
        cases += _quick_start_cases(results["quickstart"])
    for source in SOURCES:
        if not (DATA / source).exists():
            cases.append(Case(f"{source}: no data in {DATA}", None, ""))
        if of_seeds := _of_seeds(source, results):
            cases += seed_cases(source, of_seeds)
    return cases


def _of_seeds(source: str, results: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The results of a source's seeds, once all are there."""
    names = [f"{source}-{seed}" for seed in SEEDS]
    return [results[name] for name in names] if all(name in results for name in names) else []


def _result(workdir: Path, summary: Path) -> dict[str, Any]:
    """The figures that are kept of one training."""
    return {
        "summary": json.loads(summary.read_text()),
        "checkpoints": len(metrics(workdir, "eval/return")),
        "env_steps": metrics(workdir, "train/env_steps")[-1],
        "rate": transition_rate(workdir),
        "compilation": metrics(workdir, "speed/compilation_seconds")[0],
    }


def _evaluate(workdir: Path, out: Path, *fields: str) -> Path:
    """Scores a run as a user does; returns the summary's path."""
    command("qrag_jax.evaluate", f"--workdir={workdir}", f"--out={out}", *fields)
    (summary,) = out.glob("*_summary.json")
    return summary


def _seed(source: str, seed: int, runs: Path) -> dict[str, Any]:
    """Trains on a data set; half 0 of its dev questions selects, half 1 is reported."""
    halves: Halves = write_halves(source, DATA / source, runs / "halves")
    workdir = runs / f"{source}-seed{seed}"
    untrained = Path(REPORTED) / "untrained"
    for other in (runs / f"{source}-seed{s}" for s in SEEDS):
        # Every seed starts from the same MiniLM, so the untrained model is scored only once.
        if (other / untrained).exists() and not (workdir / REPORTED).exists() and other != workdir:
            shutil.copytree(other / untrained, workdir / untrained)
    train(
        workdir,
        f"configs/{source}.py:minilm",
        f"--config.data.path={halves.train}",
        f"--config.eval.path={halves.selects}",
        f"--config.seed={seed}",
    )
    reported = f"--config.eval.path={halves.reported}"
    result = _result(workdir, _evaluate(workdir, workdir / REPORTED, reported))
    return result | {name: _lines(getattr(halves, name)) for name in Halves._fields}


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _quick_start(workdir: Path) -> dict[str, Any]:
    train(workdir, "configs/quickstart.py")
    other = f"--config.data.synthetic.seed={OTHER_WORLD}"
    return _result(workdir, _evaluate(workdir, workdir / REPORTED, other))


def _equal_transitions(workdir: Path) -> dict[str, Any]:
    """Same records and as many transitions as the public code's run; scores the last checkpoint."""
    folder = DATA / "hotpotqa"
    train(
        workdir,
        "configs/hotpotqa.py:minilm",
        f"--config.data.path={folder / 'train.jsonl.gz'}",
        f"--config.eval.path={folder / 'dev.jsonl.gz'}",
        f"--config.train.steps={EQUAL_STEPS}",
        f"--config.train.eval_every={EQUAL_STEPS}",
    )
    return _result(workdir, _evaluate(workdir, workdir / REPORTED, "--checkpoint=last"))


def transition_rate(workdir: Path) -> float:
    """Environment steps per second of training, logging and data included."""
    steps = metrics(workdir, "train/env_steps")
    rates = metrics(workdir, "speed/steps_per_second")
    every = json.loads((workdir / "config.json").read_text())["train"]["log_every"]
    return statistics.median(rates[1:] or rates) * steps[-1] / len(steps) / every


def _quick_start_cases(result: Mapping[str, Any]) -> list[Case]:
    summary, count = result["summary"], result["checkpoints"]
    trained = summary["trained"]["fact_em"]
    asked = f"quick start, {summary['samples']} questions of another invented world"
    cases = [Case(f"{asked}: trained fact EM (best of {count} checkpoints)", trained, "share")]
    for name in RETRIEVERS[:-1]:
        base = summary[name]["fact_em"]
        cases.append(
            Case(
                f"quick start: trained - {name.replace('_', ' ')} fact EM",
                trained - base,
                "share",
                peer=base,
                ratio=trained / base if base else None,
                target=">= 0.30",
                holds=trained - base >= 0.30,
            )
        )
    seconds = summary["seconds"]
    cases.append(Case("quick start: training", seconds, "s", target="< 600 s", holds=seconds < 600))
    return cases


def _equal_transitions_cases(result: Mapping[str, Any]) -> list[Case]:
    trained, rate = result["summary"]["trained"], result["rate"]
    least = PUBLIC_FACT_EM - 2 * 2**0.5 * PUBLIC_ERROR
    interval = trained["intervals"]["fact_em"]
    own: dict[str, float | str] = {
        "95 % interval of ours": f"[{interval['low']:.3f}, {interval['high']:.3f}]"
    }
    return [
        Case(
            f"hotpotqa, {PUBLIC_TRANSITIONS} transitions, last checkpoint: fact EM beside the "
            f"public code's ({PUBLIC})",
            trained["fact_em"],
            "share",
            peer=PUBLIC_FACT_EM,
            target=f"equal quality: >= {least:.2f} (2 standard errors of a difference)",
            holds=trained["fact_em"] >= least,
            details=own | PUBLIC_ABOUT,
        ),
        Case(
            "hotpotqa: training rate beside the public code's (one run, measured by hand, no "
            "command)",
            rate,
            "transitions/s",
            peer=PUBLIC_RATE,
            ratio=rate / PUBLIC_RATE,
            target="well over 2x",
            holds=rate > 2 * PUBLIC_RATE,
        ),
        Case(
            "compilation of all programs, MiniLM, first start",
            result["compilation"],
            "s",
            target="< 20 s for the step",
            holds=result["compilation"] < 20,
        ),
    ]


def selection(result: Mapping[str, Any]) -> str:
    """How the checkpoint was chosen, and on what it is reported."""
    return (
        f"half 1, {result['reported']} questions (half 0, {result['selects']} others, selects the "
        f"best of {result['checkpoints']} checkpoints)"
    )


def seed_cases(name: str, results: Sequence[Mapping[str, Any]]) -> list[Case]:
    """The cases of a source over its seeds, all on half 1."""
    summaries = [result["summary"] for result in results]
    cases = [Case(f"{name}: reported on {selection(results[0])}", results[0]["reported"], "")]
    for score in SCORES:
        baseline = statistics.mean(s["untrained"][score] for s in summaries)
        for retriever in RETRIEVERS:
            values = [s[retriever][score] for s in summaries]
            mean = statistics.mean(values)
            spread = " ".join(f"{value:.3f}" for value in values)
            cases.append(
                Case(
                    f"{name}, half 1 (half 0 selects): {score} {retriever.replace('_', ' ')} "
                    f"(seeds {spread})",
                    mean,
                    "share",
                    peer=baseline,
                    ratio=mean / baseline if baseline else None,
                )
            )
        gains = [s["gains"]["untrained"][score] for s in summaries]
        intervals = " ".join(f"[{gain['low']:.3f}, {gain['high']:.3f}]" for gain in gains)
        cases.append(
            Case(
                f"{name}, half 1 (half 0 selects): {score} trained - untrained, paired intervals "
                f"{intervals}",
                statistics.mean(gain["mean"] for gain in gains),
                "share",
                target="above 0 in every seed's interval",
                holds=all(gain["low"] > 0 for gain in gains),
            )
        )
    minutes = statistics.mean(s["seconds"] / 60 for s in summaries)
    steps = statistics.mean(result["env_steps"] for result in results)
    cases.append(Case(f"{name}: environment steps", steps, "transitions"))
    cases.append(Case(f"{name}: training with evaluations", minutes, "minutes"))
    return cases


def seed_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/results.md: scores by source, means over the seeds."""
    header = ["fact EM / F1 / precision", "reported on (what selects the checkpoint)", *COLUMNS]
    header += ["environment steps", "minutes"]
    lines = []
    for source in SOURCES:
        if found := _of_seeds(source, results):
            name = f"{source}, {found[0]['train']} training questions, seeds {_listed(SEEDS)}"
            lines.append([name, selection(found[0]), *_scores(found)])
    if "quickstart" in results:
        one = results["quickstart"]
        asked = f"{one['summary']['samples']} questions of another invented world (those of its "
        asked += f"own select the best of {one['checkpoints']} checkpoints)"
        lines.append(["quick start, invented two-hop questions, seed 42", asked, *_scores([one])])
    return report.markdown(header, lines)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _scores(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cells of a line: each retriever's means and range of intervals, then steps and minutes."""
    summaries = [result["summary"] for result in results]
    cells = []
    for retriever in RETRIEVERS:
        means = [statistics.mean(s[retriever][score] for s in summaries) for score in SCORES]
        ends = [s[retriever]["intervals"]["fact_em"] for s in summaries]
        low, high = min(end["low"] for end in ends), max(end["high"] for end in ends)
        cells.append(f"{' / '.join(f'{each:.3f}' for each in means)} [{low:.3f}, {high:.3f}]")
    steps = statistics.mean(result["env_steps"] for result in results)
    minutes = statistics.mean(s["seconds"] / 60 for s in summaries)
    return [*cells, f"{steps:,.0f}", f"{minutes:.1f}"]


def _quick_cases(workdir: Path) -> list[Case]:
    fewer = "--config.encoder.length_buckets=1"  # fewer programs to compile
    train(workdir, "configs/quickstart.py:tiny", "--config.train.steps=30", fewer)
    other = f"--config.data.synthetic.seed={OTHER_WORLD}"
    result = _result(workdir, _evaluate(workdir, workdir / REPORTED, other))
    summary = result["summary"]
    chosen = f"another world (its own selects the best of {result['checkpoints']} checkpoints)"
    return [
        Case(f"tiny, {chosen}: trained fact EM", summary["trained"]["fact_em"], "share"),
        Case("tiny: untrained fact EM", summary["untrained"]["fact_em"], "share"),
        Case("tiny: training rate", result["rate"], "transitions/s"),
        Case(
            "tiny: training",
            summary["seconds"],
            "s",
            target="< 50 s",
            holds=summary["seconds"] < 50,
        ),
    ]

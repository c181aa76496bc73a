"""Does training help? Real trainings, scored by the command a user gives.

The full suite trains MiniLM with three seeds on HotpotQA and MuSiQue records (folder QRAG_DATA,
default ../shared/data) and once on the quick start; runs are kept in runs/benchmarks/learn, where
an interrupted suite goes on. `--quick` trains a tiny encoder on invented questions instead.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Case

RUNS = Path("runs/benchmarks/learn")
SEEDS = (42, 43, 44)
DATA = Path(os.environ.get("QRAG_DATA", "../shared/data"))
RETRIEVERS = ("untrained", "single_step", "single_step_trained", "trained")

# The public PyTorch code, MiniLM, train.jsonl.gz -> dev.jsonl.gz, one seed, on 2 cores.
PUBLIC_FACT_EM, PUBLIC_TRANSITIONS, PUBLIC_RATE = 0.59, 1313, 1.5
EQUAL_STEPS = 164  # of 4 questions with 2 steps: 1,312 transitions


def run(quick: bool) -> list[Case]:
    """All cases of the suite."""
    if quick:
        return _quick_cases()
    cases = _equal_transitions_cases()
    cases += _quick_start_cases(_train("quickstart", "configs/quickstart.py"))
    for name, config in (("hotpotqa", "hotpotqa"), ("musique", "musique")):
        if not (DATA / name).exists():
            cases.append(Case(f"{name}: no data in {DATA}", None, ""))
            continue
        cases += _seed_cases(name, _train_seeds(name, config))
    return cases


def _train_seeds(name: str, config: str) -> list[Path]:
    runs: list[Path] = []
    for seed in SEEDS:
        workdir = RUNS / f"{name}-seed{seed}"
        if runs and not (workdir / "eval").exists():
            # Every seed starts from the same MiniLM: the untrained one is scored once.
            shutil.copytree(runs[0] / "eval" / "untrained", workdir / "eval" / "untrained")
        runs.append(
            _train(
                workdir.name,
                f"configs/{config}.py:minilm",
                f"--config.data.path={DATA / name}",
                f"--config.seed={seed}",
            )
        )
    return runs


def _train(name: str, config: str, *fields: str, evaluate: Sequence[str] = ()) -> Path:
    """Trains and scores with the user's own commands; returns the run's folder."""
    workdir = RUNS / name
    _command("qrag_jax.train", f"--config={config}", f"--workdir={workdir}", *fields)
    _command("qrag_jax.evaluate", f"--workdir={workdir}", *evaluate)
    return workdir


def _command(module: str, *arguments: str) -> None:
    print(f"$ python -m {module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)  # noqa: S603


def _summary(workdir: Path) -> dict:
    return json.loads((workdir / "summary.json").read_text())


def _metrics(workdir: Path, key: str) -> list[float]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


def _transition_rate(workdir: Path) -> float:
    """Environment steps per second of training, logging and data included."""
    steps = _metrics(workdir, "train/env_steps")
    rates = _metrics(workdir, "speed/steps_per_second")
    per_step = steps[-1] / len(steps) / _log_every(workdir)
    return statistics.median(rates[1:] or rates) * per_step


def _log_every(workdir: Path) -> int:
    return json.loads((workdir / "config.json").read_text())["train"]["log_every"]


def _quick_start_cases(workdir: Path) -> list[Case]:
    summary = _summary(workdir)
    trained = summary["trained"]["fact_em"]
    cases = [Case("quick start: trained fact EM", trained, "share")]
    for name in ("untrained", "single_step", "single_step_trained"):
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


def _equal_transitions_cases() -> list[Case]:
    """Same records and transitions as the public code's run."""
    folder = DATA / "hotpotqa"
    if not folder.exists():
        return [Case(f"hotpotqa: no data in {DATA}", None, "")]
    workdir = _train(
        "hotpotqa-public",
        "configs/hotpotqa.py:minilm",
        f"--config.data.path={folder / 'train.jsonl.gz'}",
        f"--config.eval.path={folder / 'dev.jsonl.gz'}",
        f"--config.train.steps={EQUAL_STEPS}",
        f"--config.train.eval_every={EQUAL_STEPS}",
        evaluate=("--checkpoint=last",),
    )
    trained = _summary(workdir)["trained"]["fact_em"]
    rate = _transition_rate(workdir)
    return [
        Case(
            f"hotpotqa, {PUBLIC_TRANSITIONS} transitions: fact EM beside the public code",
            trained,
            "share",
            peer=PUBLIC_FACT_EM,
            ratio=trained / PUBLIC_FACT_EM,
            target=">= 0.59",
            holds=trained >= PUBLIC_FACT_EM,
        ),
        Case(
            "hotpotqa: training rate beside the public code",
            rate,
            "transitions/s",
            peer=PUBLIC_RATE,
            ratio=rate / PUBLIC_RATE,
            target="well over 2x",
            holds=rate > 2 * PUBLIC_RATE,
        ),
        _compilation_case(workdir),
    ]


def _compilation_case(workdir: Path) -> Case:
    seconds = _metrics(workdir, "speed/compilation_seconds")[0]
    return Case(
        "compilation of all programs, MiniLM, first start",
        seconds,
        "s",
        target="< 20 s for the step",
        holds=seconds < 20,
    )


def _seed_cases(name: str, runs: Sequence[Path]) -> list[Case]:
    summaries = [_summary(run) for run in runs]
    cases = []
    for score in ("fact_em", "fact_f1"):
        baseline = statistics.mean(s["untrained"][score] for s in summaries)
        for retriever in RETRIEVERS:
            values = [s[retriever][score] for s in summaries]
            mean = statistics.mean(values)
            spread = " ".join(f"{value:.3f}" for value in values)
            cases.append(
                Case(
                    f"{name}: {score} {retriever.replace('_', ' ')} (seeds {spread})",
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
                f"{name}: {score} trained - untrained, paired intervals {intervals}",
                statistics.mean(gain["mean"] for gain in gains),
                "share",
                target="above 0 in every seed's interval",
                holds=all(gain["low"] > 0 for gain in gains),
            )
        )
        apart = [
            s["trained"]["intervals"][score]["low"] - s["untrained"]["intervals"][score]["high"]
            for s in summaries
        ]
        cases.append(
            Case(
                f"{name}: {score} gap between trained's and untrained's own intervals, least seed",
                min(apart),
                "share",
                target="> 0",
                holds=min(apart) > 0,
            )
        )
    steps = statistics.mean(_metrics(run, "train/env_steps")[-1] for run in runs)
    minutes = statistics.mean(s["seconds"] / 60 for s in summaries)
    cases.append(Case(f"{name}: environment steps", steps, "transitions"))
    cases.append(Case(f"{name}: training with evaluations", minutes, "minutes"))
    return cases


def _quick_cases() -> list[Case]:
    workdir = _train(
        "quick", "configs/quickstart.py:tiny", "--config.train.steps=30", "--config.eval.samples=16"
    )
    summary = _summary(workdir)
    return [
        Case("tiny: trained fact EM", summary["trained"]["fact_em"], "share"),
        Case("tiny: untrained fact EM", summary["untrained"]["fact_em"], "share"),
        Case("tiny: training rate", _transition_rate(workdir), "transitions/s"),
        Case(
            "tiny: training",
            summary["seconds"],
            "s",
            target="< 50 s",
            holds=summary["seconds"] < 50,
        ),
    ]

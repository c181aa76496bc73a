"""Measures a newcomer's first hour.

Part `mistakes` makes the typical mistakes of `newcomer_mistakes`, and reads what is said to them.
Part `start` clones the checkout, runs `make train` where nothing is installed, and times what comes
when (`newcomer_start`); part `wheel` builds the wheel and does it in an empty folder. Parts `pages`
and `pages-wheel` follow the README and docs/ in the same two places (`newcomer_pages`).

Part `hidden-support-SEED` trains MiniLM on HotpotQA records (folder QRAG_DATA, default
../shared/data) in the neutral schema with the supporting passages hidden, by the weak reward
`answer_in_chunk`, and follows it on one half of the evaluation questions. Only then are the
passages that the last checkpoint takes on the other half measured against the supporting ones.
(Over some hundred questions that reward is too noisy to choose a checkpoint.)
Runs and results are kept in runs/benchmarks/newcomer. `--quick` trains a tiny encoder on invented
questions instead.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import newcomer_pages
from benchmarks.halves import Halves, write_halves
from benchmarks.kept_runs import Kept, Part, begin_anew, command, metrics, train
from benchmarks.newcomer_mistakes import make_files, mistakes, tried
from benchmarks.newcomer_start import from_wheel, start_cases, started
from benchmarks.report import Case, cases_markdown
from qrag_jax import convert_data
from qrag_jax.errors import InputError
from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.bootstrap import paired_interval
from qrag_jax.metrics.facts import fact_recall

SEEDS = (42, 43, 44)
DATA = Path(os.environ.get("QRAG_DATA", "../shared/data"))
SOURCE = "hotpotqa"
NAME = "hidden-support"
HIDDEN = "--config.data.columns.support="
SHOWN = "--config.data.columns.support=support"
# Which of two steps takes the answer does not matter: the other passage leads to it.
REWARD = ("--config.reward.name=answer_in_chunk", "--config.reward.penalize_extra_steps=False")


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, the cases of its finished parts."""
    kept = Kept.of("newcomer")
    if quick:
        return _quick_cases(begin_anew(kept.runs / "quick"))
    parts: dict[str, Part] = {"mistakes": _mistakes, "start": started, "wheel": from_wheel}
    parts |= {"pages": newcomer_pages.in_clone, "pages-wheel": newcomer_pages.with_wheel}
    if (DATA / SOURCE).exists():
        parts |= {f"{NAME}-{seed}": partial(_hidden_support, seed, kept.runs) for seed in SEEDS}
    results = kept.finish(parts, only)
    cases = mistake_cases(results["mistakes"]["tried"]) if "mistakes" in results else []
    cases += start_cases({name: results[name] for name in ("start", "wheel") if name in results})
    cases += newcomer_pages.page_cases(results)
    hidden = [name for name in parts if name.startswith(NAME)]
    cases += hidden_cases([results[name] for name in hidden if name in results])
    if not hidden:
        cases.append(Case(f"{NAME}: no data in {DATA}", None, ""))
    note = "Recall of supporting passages that training never saw; means over the seeds."
    kept.write_tables(results, note, [cases_markdown(cases)])
    return cases


def _mistakes() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        return {"tried": {each.what: tried(each, Path(folder)) for each in mistakes()}}


def mistake_cases(found: Mapping[str, Mapping[str, Any]]) -> list[Case]:
    """How many mistakes got one sentence with the fix; the others one by one."""
    wrong = {what: row["fault"] for what, row in found.items() if row["fault"]}
    seconds = [row["seconds"] for row in found.values()]
    details: dict[str, float | str] = {
        "median, s": statistics.median(seconds),
        "slowest, s": max(seconds),
        **{what: found[what]["sentence"] for what in found},
    }
    name = f"{len(found)} typical mistakes: one sentence that says what to do"
    right = len(found) - len(wrong)
    cases = [Case(name, right, "", target=f"{len(found)}", holds=not wrong, details=details)]
    for what, fault in wrong.items():
        cases.append(Case(f"{what}: {fault}", 0, "", target="1", holds=False))
    return cases


def neutral_halves(runs: Path) -> Halves:
    """HotpotQA's training records, and both halves of its evaluation records, as own data."""
    official = write_halves(SOURCE, DATA / SOURCE, runs / "halves")
    files = Halves(*(runs / "own" / path.name for path in official))
    for path, out in zip(official, files, strict=True):
        if convert_data.main([f"--source={SOURCE}", f"--path={path}", f"--out={out}"]) == 2:
            raise InputError(f"{path} cannot be written in the neutral schema as {out}.")
    return files


def _hidden_support(seed: int, runs: Path) -> dict[str, Any]:
    halves = neutral_halves(runs)
    fields = (
        *REWARD,
        HIDDEN,
        f"--config.data.path={halves.train}",
        f"--config.eval.path={halves.selects}",
        f"--config.seed={seed}",
    )
    workdir = train(runs / f"{NAME}-seed{seed}", "configs/own.py:minilm", *fields)
    return _measured(workdir, f"--config.eval.path={halves.reported}")


def _measured(workdir: Path, *fields: str) -> dict[str, Any]:
    """Scores a run against the supporting passages, which it has not seen until now."""
    out = workdir / "reported-last"
    where = f"--workdir={workdir}", "--checkpoint=last", f"--out={out}"
    command("qrag_jax.evaluate", *where, SHOWN, *fields)
    (path,) = out.glob("*_summary.json")
    summary = json.loads(path.read_text())
    name = path.name.replace("_summary.json", ".jsonl")
    label = f"{summary['checkpoint']}-{summary['step']}"
    logs = {each: retrieval_log.read(out / each / name) for each in (label, "untrained")}
    recalls = {
        each: [fact_recall(row.sf_idx, row.pred_idx) for row in rows] for each, rows in logs.items()
    }
    gain = paired_interval(recalls[label], recalls["untrained"])
    return {
        "summary": summary,
        "recall_gain": dict(zip(("mean", "low", "high"), gain, strict=True)),
        "hidden": not metrics(workdir, "train/fact_em") and not metrics(workdir, "eval/fact_em"),
        "env_steps": metrics(workdir, "train/env_steps")[-1],
    }


def hidden_cases(results: Sequence[Mapping[str, Any]]) -> list[Case]:
    """The cases over the seeds that have results."""
    if not results:
        return []
    summaries = [result["summary"] for result in results]
    questions = summaries[0]["samples"]
    about = f"HotpotQA with hidden support, {len(results)} seeds, {questions} questions"
    hidden = all(result["hidden"] for result in results)
    cases = [
        Case(
            f"{about}: no score of supporting passages in any metric of training",
            float(hidden),
            "",
            target="1",
            holds=hidden,
        )
    ]
    for score in ("fact_recall", "fact_em"):
        trained = statistics.mean(summary["trained"][score] for summary in summaries)
        before = statistics.mean(summary["untrained"][score] for summary in summaries)
        ratio = trained / before if before else None
        cases.append(Case(f"{about}: {score}, trained", trained, "share", peer=before, ratio=ratio))
    gains = [result["recall_gain"] for result in results]
    told = " ".join(f"[{gain['low']:.3f}, {gain['high']:.3f}]" for gain in gains)
    cases.append(
        Case(
            f"{about}: fact_recall, trained - untrained, paired intervals {told}",
            statistics.mean(gain["mean"] for gain in gains),
            "share",
            target="above 0 in every seed's interval",
            holds=all(gain["low"] > 0 for gain in gains),
        )
    )
    minutes = statistics.mean(summary["seconds"] / 60 for summary in summaries)
    steps = statistics.mean(result["env_steps"] for result in results)
    cases.append(Case(f"{about}: environment steps", steps, "transitions"))
    cases.append(Case(f"{about}: training with evaluations", minutes, "minutes"))
    return cases


def _quick_cases(workdir: Path) -> list[Case]:
    fewer = "--config.encoder.length_buckets=1"  # fewer programs to compile
    train(workdir, "configs/own.py:tiny", *REWARD, HIDDEN, "--config.train.steps=30", fewer)
    result = _measured(workdir)
    summary = result["summary"]
    return [
        Case(
            "tiny, hidden support: no score of supporting passages in any metric of training",
            float(result["hidden"]),
            "",
            target="1",
            holds=result["hidden"],
        ),
        Case(
            "tiny, hidden support: fact_recall, trained",
            summary["trained"]["fact_recall"],
            "share",
            peer=summary["untrained"]["fact_recall"],
        ),
        Case("tiny, hidden support: training", summary["seconds"], "s"),
    ]

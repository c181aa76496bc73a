"""Measures HARR: its ablation over 2WikiMultihopQA's open corpus, with the scripted agent.

MiniLM is trained inside the scripted agent, which needs no language model, by GRPO and by PPO,
with states that hold the history and with the sub-query alone, three seeds each. The evaluation
questions are then answered by the trained retriever and by the one it began as. Data come from the
folder QRAG_DATA (default ../shared/data). Runs and results are kept in runs/benchmarks/harr by
version of the code: an interrupted suite resumes, and `--only=PART` runs one part, such as grpo-
stateful-42. `--quick` trains the tiny configs instead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept_runs import Kept, Part, command, train
from benchmarks.report import Case
from benchmarks.speed.ours import DATA
from qrag_jax.metrics import agent_log
from qrag_jax.metrics.bootstrap import mean_interval, paired_interval

SEEDS = (42, 43, 44)
ALGORITHMS = ("grpo", "ppo")
STATEFUL, STATELESS = STATES = ("stateful", "stateless")
SCORES = ("f1", "recall")
UNTRAINED = "untrained"
QUESTIONS, MEMBERS = 8, 8
# A step of PPO computes all episodes by a critic and by the first weights, too: 6 times as long.
STEPS = {"grpo": 20, "ppo": 10}
# 64 episodes a step by both: groups of 8 of one question, or one of each question.
BATCHES = {
    "grpo": (f"train.batch_size={QUESTIONS}", f"grpo.members={MEMBERS}"),
    "ppo": (f"train.batch_size={QUESTIONS * MEMBERS}", "ppo.members=1"),
}

Scores = dict[str, list[float]]  # name → of each question


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: data are missing, or `only` names an unknown part.
    """
    if quick:
        with tempfile.TemporaryDirectory() as folder:
            return [
                case
                for algorithm in ALGORITHMS
                for case in cases(algorithm, STATEFUL, [_tiny(algorithm, Path(folder))])
            ]
    kept = Kept.of("harr")
    results = kept.finish(_parts(kept.runs), only)
    found: list[Case] = []
    lines: list[str] = []
    for algorithm in ALGORITHMS:
        for state in STATES:
            runs = [
                part["scores"]
                for name, part in results.items()
                if name.startswith(f"{algorithm}-{state}-")
            ]
            if runs:
                found += cases(algorithm, state, runs)
                lines += rows(algorithm, state, runs)
    note = "Means over the seeds, intervals over the questions."
    kept.write_tables(results, note, ["\n".join([*_HEAD, *lines]) + "\n"])
    return found


def _parts(runs: Path) -> dict[str, Part]:
    return {
        f"{algorithm}-{state}-{seed}": partial(_scored, runs, algorithm, state, seed)
        for seed in SEEDS
        for state in STATES
        for algorithm in ALGORITHMS
    }


def _scored(runs: Path, algorithm: str, state: str, seed: int) -> dict[str, Any]:
    """The scores of one training, and of what it began with."""
    data = DATA / "2wikimultihopqa"
    fields = {
        "data.path": data,
        "corpus.path": data / "open_corpus.jsonl.gz",
        "seed": seed,
        "state.stateful": state == STATEFUL,
        "train.steps": STEPS[algorithm],
        "train.eval_every": STEPS[algorithm],
        "train.checkpoint_every": STEPS[algorithm],
        "eval.part": "all",  # the last checkpoint is scored, which no question chooses
    }
    words = [*(f"{name}={value}" for name, value in fields.items()), *BATCHES[algorithm]]
    workdir = train(
        runs / f"{algorithm}-{state}-{seed}",
        f"configs/harr_{algorithm}.py:minilm",
        *(f"--config.{word}" for word in words),
    )
    return {"scores": evaluated(workdir, STEPS[algorithm])}


def _tiny(algorithm: str, folder: Path) -> Mapping[str, Scores]:
    workdir = train(folder / algorithm, f"configs/harr_{algorithm}.py:tiny")
    return evaluated(workdir, 6)


def evaluated(workdir: Path, step: int) -> dict[str, Scores]:
    """The scores of each question by the last checkpoint, and by the encoder before."""
    command("qrag_jax.evaluate", f"--workdir={workdir}", "--checkpoint=last")
    found = {}
    for name, folder in (("trained", f"last-{step}"), (UNTRAINED, UNTRAINED)):
        (log,) = (workdir / "eval" / folder).glob("*.jsonl")
        read = agent_log.read_partial(log)
        found[name] = {
            score: [value for row in read if (value := getattr(row, score)) is not None]
            for score in SCORES
        }
    return found


_HEAD = (
    "| algorithm | state | F1, untrained | F1, trained | recall, untrained | recall, trained |",
    "|---" * 6 + "|",
)


def rows(algorithm: str, state: str, runs: Sequence[Mapping[str, Scores]]) -> list[str]:
    """Lines of the table: the mean over the seeds, the interval over the questions, each seed."""
    cells = []
    for score in SCORES:
        for way in (UNTRAINED, "trained"):
            every = np.mean([run[way][score] for run in runs], axis=0)
            mean, low, high = mean_interval(every)
            seeds = ", ".join(f"{np.mean(run[way][score]):.3f}" for run in runs)
            cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}] ({seeds})")
    return [f"| {algorithm} | {state} | " + " | ".join(cells) + " |"]


def cases(algorithm: str, state: str, runs: Sequence[Mapping[str, Scores]]) -> list[Case]:
    """Whether training gains: differences over the same questions, means over the seeds."""
    found = []
    for score in SCORES:
        after, before = (
            np.mean([run[way][score] for run in runs], axis=0) for way in ("trained", UNTRAINED)
        )
        mean, low, high = paired_interval(after, before)
        found.append(
            Case(
                f"2Wiki, open corpus, {algorithm}, {state}: {score}, trained - untrained",
                mean,
                "share",
                peer=float(before.mean()),
                target="above 0 in its interval",
                holds=low > 0,
                details={"low": low, "high": high, "trained": float(after.mean())},
            )
        )
    return found

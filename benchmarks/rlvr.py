"""Measures RLVR's embedded default: imitation of flawed demonstrations, then GRPO, three seeds.

Part `grpo-SEED` trains configs/rlvr.py:quick and asks 300 questions of the unseen world, with the
weights at the end and those after imitation, by all four retrievers. Beside it are `best-SEED`, the
same but that it imitates the best of each group of 8 instead, and `imitation-SEED`, which imitates
demonstrations for as long. Part `expert` is the script without flaws, on the same questions: a
bound for what can be learnt. Runs and results are kept in runs/benchmarks/rlvr by version of the
code; `--only=PART` runs one part, such as grpo-42. `--quick` trains `:tiny`.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept_runs import Kept, Part, command, train
from benchmarks.report import Case
from configs.rlvr import get_config
from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.environments.tools.demonstrations import (
    EXPERT as NO_FLAWS,
)
from qrag_jax.environments.tools.demonstrations import (
    Demonstration,
    DemonstrationsConfig,
    draw_choices,
)
from qrag_jax.environments.tools.documents import bridge_task
from qrag_jax.environments.tools.episode import Closed
from qrag_jax.environments.tools.play import ToolAgent
from qrag_jax.feedback.rubric import score
from qrag_jax.llm.text import prompts
from qrag_jax.metrics.bootstrap import mean_interval
from qrag_jax.retrieval.own_documents import own_retriever
from qrag_jax.rollouts.own_library import OwnLibrary
from qrag_jax.rollouts.scripted_tokens import scripted_talk
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.systems.rlvr_config import RlvrConfig, ToolsConfig
from qrag_jax.systems.rlvr_inputs import scorer_of

SEEDS, EXPERT, QUICK = (42, 43, 44), "expert", "quick"
GRPO, BEST, IMITATION = "grpo", "best", "imitation"
RETRIEVERS = ("bm25", "golden", "semantic", "hybrid")
ENCODER = "minilm"  # of the last two
AS_LONG = 5000  # steps of imitation that take as long as the whole default
LEAST_GAIN, MOST_MINUTES = 0.2, 25
SHOWN = ("em", "f1", "recall", "citation", "reward", "turns")


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: `only` names an unknown part.
    """
    if quick:
        with tempfile.TemporaryDirectory() as folder:
            result = _trained(Path(folder), "tiny", 42, RETRIEVERS[:2])
        return cases("tiny", result, asked=False)
    kept = Kept.of("rlvr")
    flags = {
        GRPO: (),
        BEST: ("--config.grpo.learned=best",),
        IMITATION: ("--config.stages=sft", f"--config.sft.steps={AS_LONG}"),
    }
    parts: dict[str, Part] = {}
    for how, more in flags.items():
        retrievers = RETRIEVERS if how == GRPO else RETRIEVERS[:1]
        for seed in SEEDS:
            name = f"{how}-{seed}"
            parts[name] = partial(_trained, kept.runs / name, QUICK, seed, retrievers, more)
    results = kept.finish(parts | {EXPERT: scripted}, only)
    found, lines = [], []
    for name, part in results.items():
        if name == EXPERT:
            lines += [f"| script: {told} | | {scores} |" for told, scores in part["rows"].items()]
        else:
            found += cases(name, part, asked=name.startswith(GRPO))
            lines += rows(name, part)
    head = f"| run | weights, retriever | {' | '.join(SHOWN)} |\n" + "|---" * (len(SHOWN) + 2) + "|"
    kept.write_tables(results, "Means and 95 % intervals.", ["\n".join([head, *lines]) + "\n"])
    return found


def _trained(
    workdir: Path, variant: str, seed: int, retrievers: Sequence[str], flags: Sequence[str] = ()
) -> dict[str, Any]:
    """A training and its scores."""
    began = time.monotonic()
    # The last checkpoint is scored, which no question chooses.
    flags = (f"--config.seed={seed}", "--config.eval.part=all", *flags)
    train(workdir, f"configs/rlvr.py:{variant}", *flags)
    minutes = (time.monotonic() - began) / 60
    encoder = [f"--config.tools.encoder={ENCODER}"] if "semantic" in retrievers else []
    command(
        "qrag_jax.evaluate",
        f"--workdir={workdir}",
        "--checkpoint=last",
        f"--retrievers={','.join(retrievers)}",
        *encoder,
    )
    summary = json.loads((workdir / "eval" / "summary.json").read_text())
    return {name: summary[name] for name in ("scores", "gains", "main")} | {"minutes": minutes}


def scripted() -> dict[str, Any]:
    """Scores of the script, without and with its flaws, by each retriever."""
    config, found = get_config(QUICK), {}
    rubric = RlvrConfig.of(config).rubric.rubric
    count, seed = config.questions.bridge_dev, config.questions.bridge_seed
    scorer = scorer_of(dataclasses.replace(ToolsConfig(), encoder=ENCODER), make_mesh((1, 1, 1)))
    agent = ToolAgent(prompts.load(config.tools.prompt), top_n=1, most=1)
    for told, shares in (("without flaws", NO_FLAWS), ("with flaws", DemonstrationsConfig())):
        for retriever in RETRIEVERS:
            library, parts = OwnLibrary(own_retriever(retriever, scorer)), []
            for index in range(count):
                question = bridge_question(seed, "dev", index)
                task, choices = bridge_task(question), draw_choices(shares, seed, index)
                ended = scripted_talk(agent, task, Demonstration(question, choices), library).ended
                assert isinstance(ended, Closed)
                each = score(ended, task)
                reward = rubric.reward(each, task.hops)
                parts.append(each | {"turns": ended.tally.turns, "reward": reward})
            cells = [_cell(mean_interval(np.array([p[name] for p in parts]))) for name in SHOWN]
            found[f"{told}, {retriever}"] = " | ".join(cells)
    return {"rows": found}


def rows(name: str, part: Mapping[str, Any]) -> list[str]:
    """Lines of the table."""
    lines = []
    for retriever, ways in part["scores"].items():
        for told, scores in ways.items():
            every = scores["all"]
            cells = [_cell(_interval(every[n])) if n in every else "" for n in SHOWN]
            lines.append(f"| {name} | {told}, {retriever} | {' | '.join(cells)} |")
    return lines


def _interval(found: Mapping[str, float]) -> tuple[float, float, float]:
    return found["mean"], found["low"], found["high"]


def _cell(found: Sequence[float]) -> str:
    mean, low, high = found
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def cases(name: str, part: Mapping[str, Any], *, asked: bool) -> list[Case]:
    """What a run gains on the end of imitation, if it had more, and in how many minutes."""
    found = []
    imitated = [each for each in part["gains"]["bm25"] if each.startswith("after imitation")]
    for told in imitated:
        gain = part["gains"]["bm25"][told]["em"]
        own = part["scores"]["bm25"]
        after, before = own[part["main"]["weights"]]["all"]["em"], own[told]["all"]["em"]
        holds = gain["mean"] >= LEAST_GAIN and after["low"] > before["high"]
        found.append(
            Case(
                f"{name}: EM at the end - EM after imitation",
                gain["mean"],
                "share",
                target=f">= {LEAST_GAIN}, the two intervals apart" if asked else None,
                holds=holds if asked else None,
                details={"after": _cell(_interval(after)), "before": _cell(_interval(before))},
            )
        )
    return [
        *found,
        Case(
            f"{name}: training",
            part["minutes"],
            "min",
            target=f"<= {MOST_MINUTES}" if asked else None,
            holds=part["minutes"] <= MOST_MINUTES if asked else None,
        ),
    ]

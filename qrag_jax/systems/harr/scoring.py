"""Scores a HARR run: its agent answers the evaluation questions, with three retrievers.

They are the one that was trained, the encoder that it started from in the same states, and this
encoder by the sub-query alone. All search greedily.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qrag_jax.data.sample import Sample
from qrag_jax.evaluators.agents import agent_row
from qrag_jax.learners.state import encoder_key, place
from qrag_jax.metrics.bootstrap import gains, score_table
from qrag_jax.metrics.rows import AGENTS, AgentRow
from qrag_jax.metrics.summaries import agent_columns, agent_summary, pass_at
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems import scoring
from qrag_jax.systems.harr.config import ALGORITHMS, HarrConfig
from qrag_jax.systems.harr.system import Harr, load_inputs, open_models

_OF_QUESTIONS = ("data.path", "data.sources", "eval.path")
AT_ONCE = 256  # questions played side by side, and written together
_SAMPLED = 2**31 - 2  # in place of a step's number: of draws for pass@k
_STATELESS = "untrained, the sub-query alone"


def score_run(workdir: Path, raw: ConfigDict, options: scoring.ScoreOptions) -> dict[str, Any]:
    scoring.check_trained(workdir)
    raw, out, halves = scoring.begin_scoring(workdir, raw, options, scoring.DATA, _OF_QUESTIONS)
    raw.questions.kept = ""  # only training needs it
    config = HarrConfig.of(raw)
    with opened_run(config, workdir) as (system, stop):
        inputs = system.inputs
        alone = dataclasses.replace(config.state, stateful=False)
        stateless = dataclasses.replace(system, config=dataclasses.replace(config, state=alone))
        trained = inputs.encoder.trained, system.learner.shardings.params
        params, step = scoring.saved_params(workdir, options.checkpoint, *trained)
        first = place(*trained)
        main = f"trained, {options.checkpoint} checkpoint of step {step}"
        file = f"agent_seed{config.eval.seed}"
        own = f"{options.checkpoint}-{step}/{file}"
        three = (
            agent_way(stateless, stop, f"untrained-the-sub-query-alone/{file}", _STATELESS, first),
            agent_way(system, stop, f"untrained/{file}", "untrained", first),
            agent_way(system, stop, own, main, params, sampled=options.sampled),
        )
        free = {"train", "optimizer", "runtime", "profile", "llm", "reranker", "questions"}
        kept = {n: v for n, v in raw.to_dict().items() if n not in free | {*ALGORITHMS}}
        record = {
            "config": kept,
            "data": inputs.data,
            "questions": len(inputs.dev),
            "sampled": options.sampled,
            "answers depend on": system.provenance,
        }
        asked = scoring.Questions(AGENTS, inputs.dev, AT_ONCE)
        ways = (way._replace(record={**record, **way.record}) for way in three)
        played, _ = asked.played(out, ways, stop, restart=options.restart)
    rows = {label: AGENTS.read(log) for label, log in played}
    summary: dict[str, Any] = {"checkpoint": options.checkpoint, "step": step}
    summary["questions"] = halves(inputs.drawn)
    summary |= scoring.compared(rows, main, agent_summary, _gains)
    if options.sampled:
        summary["pass@k"] = _passes(rows[main], options.sampled)
    return scoring.end_scoring(out, raw, summary, [*_table(summary), summary["questions"]["line"]])


@contextlib.contextmanager
def opened_run(config: HarrConfig, folder: Path) -> Iterator[tuple[Harr, StopSignal]]:
    mesh = config.mesh()
    with StopSignal() as stop, open_models(config, folder) as models:
        inputs = load_inputs(config, folder, mesh, stop, is_kept=True)
        if models.model is not None:
            models.model.wait(stop)
        yield Harr(config, mesh, inputs, models), stop


def agent_way(
    system: Harr, stop: StopSignal, name: str, label: str, params: Any, *, sampled: int = 0
) -> scoring.Way:
    """How these parameters search: greedily, and in so many drawn episodes besides."""

    def play(part: Sequence[Sample], first: int) -> list[AgentRow]:
        starts = system.starts(part, 1, _SAMPLED, first)
        episodes = system.play(params, starts, stop, is_greedy=True)
        rows = [agent_row(each, episode) for each, episode in zip(part, episodes)]
        if not sampled:
            return rows
        drawn = system.play(params, system.starts(part, sampled, _SAMPLED, first), stop)
        for i, each in enumerate(part):
            every = (agent_row(each, one) for one in drawn[i * sampled : (i + 1) * sampled])
            whole = [row.em > 0 for row in every if not row.failed]
            rows[i] = dataclasses.replace(rows[i], right=sum(whole), sampled=len(whole))
        return rows

    record = {"way": label, "weights": encoder_key(params, {})}
    return scoring.Way(name, label, play, record)


def _gains(rows: Sequence[AgentRow], others: Sequence[AgentRow]) -> dict[str, Any]:
    """Paired differences over the questions that failed in neither."""
    both = [pair for pair in zip(rows, others, strict=True) if not any(row.failed for row in pair)]
    ours, theirs = (agent_columns([pair[side] for pair in both]) for side in (0, 1))
    return gains({name: ours[name] for name in ("em", "f1", "recall")}, theirs)


def _passes(rows: Sequence[AgentRow], sampled: int) -> dict[str, float]:
    """Of 1, 2, 4, … draws; a question counts where so many are whole."""
    known = [row for row in rows if row.right is not None]
    passes = {
        str(k): [pass_at(k, row.right or 0, row.sampled) for row in known if row.sampled >= k]
        for k in (1 << place for place in range(sampled.bit_length()))
    }
    return {k: float(np.mean(values)) for k, values in passes.items() if values}


def _table(summary: Mapping[str, Any]) -> list[str]:
    columns, losses = ("em", "f1", "recall", "hops"), ("broken", "failed")
    counts = {each: f"{{{each}}} of {{questions}}" for each in losses}
    over = ((f"gain over {name}", gain) for name, gain in summary["gains"].items())
    text = score_table(summary["scores"].items(), columns, counts, over)
    if "pass@k" in summary:
        passes = ", ".join(f"{k}: {value:.3f}" for k, value in summary["pass@k"].items())
        text.append(f"pass@k of drawn passages: {passes}")
    return text

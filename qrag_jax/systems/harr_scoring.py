"""Scores a HARR run: its agent answers the evaluation questions, with three retrievers.

They are the one that was trained, the encoder that it started from in the same states, and this
encoder by the sub-query alone. All search greedily. `filter_questions` finds the training questions
whose reward varies between episodes of one policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.agents import agent_row
from qrag_jax.feedback.rag import Gold
from qrag_jax.feedback.rewards import Unscored
from qrag_jax.learners import placement
from qrag_jax.metrics.bootstrap import named, paired_interval, score_table
from qrag_jax.metrics.row_log import begin, differing_in_part, refuse_other
from qrag_jax.metrics.rows import AGENTS, REWARDS, AgentRow, RewardRow
from qrag_jax.metrics.summaries import agent_summary, judged, pass_at, reward_row
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.rollouts.agents import Episode
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.saved_config import flat
from qrag_jax.systems.harr import Harr
from qrag_jax.systems.harr_config import ALGORITHMS, HarrConfig
from qrag_jax.systems.harr_inputs import INDEX, PASSAGES, HarrModels, load_inputs, open_models
from qrag_jax.systems.q_rag_scoring import DATA
from qrag_jax.systems.scoring import (
    Questions,
    ScoreOptions,
    Way,
    begin_scoring,
    beside,
    end_scoring,
)

_OF_QUESTIONS = ("data.path", "data.sources", "eval.path")
AT_ONCE = 256  # questions played side by side, and written together
_SAMPLED = 2**31 - 2  # in place of a step's number: of draws for pass@k
_STATELESS = "untrained, the sub-query alone"


def score_agent(workdir: Path, raw: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    _check_trained(workdir)
    raw, out, halves = begin_scoring(workdir, raw, options, DATA, _OF_QUESTIONS)
    raw.questions.kept = ""  # only training needs it
    config = HarrConfig.of(raw)
    with _opened(config, workdir) as (system, models, stop):
        inputs = system.inputs
        alone = dataclasses.replace(config.state, stateful=False)
        stateless = Harr(dataclasses.replace(config, state=alone), system.mesh, inputs, models)
        params, step = checkpoint_params(system, workdir, options.checkpoint)
        first = placement.place(inputs.encoder.trained, system.learner.shardings.params)
        main = f"trained, {options.checkpoint} checkpoint of step {step}"
        file = f"agent_seed{config.eval.seed}"
        own = f"{options.checkpoint}-{step}/{file}"
        ways = [
            agent_way(stateless, stop, f"untrained-the-sub-query-alone/{file}", _STATELESS, first),
            agent_way(system, stop, f"untrained/{file}", "untrained", first),
            agent_way(system, stop, own, main, params, sampled=options.sampled),
        ]
        free = {"train", "optimizer", "runtime", "profile", "llm", "reranker", "questions"}
        kept = {n: v for n, v in raw.to_dict().items() if n not in free | {*ALGORITHMS}}
        record = {
            "config": json.loads(json.dumps(kept)),
            "data": inputs.data,
            "questions": len(inputs.dev),
            "sampled": options.sampled,
            "answers depend on": json.loads(json.dumps(models.provenance)),
        }
        asked = agent_questions(system)
        played, _ = asked.played(out, ways, record, stop, restart=options.restart)
    rows = {way.label: AGENTS.read(log) for way, log in played}
    summary: dict[str, Any] = {"checkpoint": options.checkpoint, "step": step}
    summary["questions"] = halves(inputs.drawn)
    summary |= beside(rows, main, agent_summary, _gains)
    if options.sampled:
        summary["pass@k"] = _passes(rows[main], options.sampled)
    return end_scoring(out, raw, summary, [*_table(summary), summary["questions"]["line"]])


@contextlib.contextmanager
def _opened(config: HarrConfig, folder: Path) -> Iterator[tuple[Harr, HarrModels, StopSignal]]:
    """The system with the encoder and the index of a folder."""
    mesh = config.mesh()
    with StopSignal() as stop, open_models(config, folder) as models:
        inputs = load_inputs(config, folder, mesh, stop, is_kept=True)
        models.wait(stop)
        yield Harr(config, mesh, inputs, models), models, stop


def _check_trained(workdir: Path) -> None:
    if not (workdir / FOLDER).exists():
        raise InputError(f"{workdir} holds no encoder; --workdir must be a run that was trained.")


def checkpoint_params(system: Harr, workdir: Path, name: str) -> tuple[Any, int]:
    """The trained parameters of a run's checkpoint "best" or "last", and its step."""
    shardings = system.learner.shardings.params
    template = placement.shapes_on(system.inputs.encoder.trained, shardings)
    return Checkpoints(workdir, read_only=True).restore_params(name, template)


def agent_questions(system: Harr) -> Questions[Gold, AgentRow]:
    """The questions that are scored."""
    return Questions(AGENTS, system.inputs.dev, lambda row, each: row.id == each.id, AT_ONCE)


def agent_way(
    system: Harr, stop: StopSignal, name: str, label: str, params: Any, *, sampled: int = 0
) -> Way[AgentRow]:
    """How these parameters search: greedily, and in so many drawn episodes besides."""

    def play(params: Any, part: Sequence[Gold], first: int) -> list[AgentRow]:
        starts = system.starts(part, 1, _SAMPLED, first)
        episodes = system.play(params, starts, stop, is_greedy=True)
        rows = [agent_row(each, episode) for each, episode in zip(part, episodes)]
        if not sampled:
            return rows
        drawn = system.play(params, system.starts(part, sampled, _SAMPLED, first), stop)
        return [
            _with_samples(row, each, drawn[i * sampled : (i + 1) * sampled])
            for i, (row, each) in enumerate(zip(rows, part, strict=True))
        ]

    record = {"way": label, "weights": encoder_key(params, {})}
    return Way(name, label, play, lambda: params, record)


def _with_samples(row: AgentRow, gold: Gold, drawn: Sequence[Episode]) -> AgentRow:
    whole = [each for each in (agent_row(gold, episode) for episode in drawn) if not each.failed]
    return dataclasses.replace(row, right=sum(each.em > 0 for each in whole), sampled=len(whole))


def _gains(rows: Sequence[AgentRow], others: Sequence[AgentRow]) -> dict[str, Any]:
    """Paired differences over the questions that failed in neither."""
    both = [(a, b) for a, b in zip(rows, others, strict=True) if not a.failed and not b.failed]
    gains = {}
    for name in ("em", "f1", "recall"):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in both]
        pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
        if pairs:
            gains[name] = named(paired_interval(*np.transpose(pairs)))
    return gains


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
    gains = ((f"gain over {name}", gain) for name, gain in summary["gains"].items())
    text = score_table(summary["scores"].items(), columns, counts, gains)
    if "pass@k" in summary:
        passes = ", ".join(f"{k}: {value:.3f}" for k, value in summary["pass@k"].items())
        text.append(f"pass@k of drawn passages: {passes}")
    return text


_FILTERED = 2**31 - 3  # in place of a step's number: no step has it, and no evaluation
# Sections of the config that a first policy's episodes do not depend on.
_OF_TRAINING = ("train.", "optimizer.", "grpo.", "ppo.", "algorithm", "eval.", "questions.")


def filter_questions(
    raw: ConfigDict,
    log: Path,
    *,
    rollouts: int,
    least_std: float,
    workdir: Path | None,
    checkpoint: str,
    restart: bool,
) -> list[RewardRow]:
    """Plays all training questions that the log lacks; returns the rows of all.

    GRPO learns nothing from a question whose episodes all have the same reward. Every question is
    played several times, and its rewards are logged. The draws of an episode depend on the number
    of its question and of its member alone.

    Args:
        rollouts: episodes of each question.
        least_std: a question is kept if its rewards have a greater standard deviation.
        workdir: of a run, whose checkpoint plays; None: the first encoder.
    """
    raw = raw.copy_and_resolve_references()
    raw.questions.kept = ""  # also those that were left out are played again
    config, count = HarrConfig.of(raw), rollouts
    folder = workdir or log.with_suffix(".files")  # of encoder and index
    if workdir:
        _check_trained(workdir)
    free = (*HarrConfig.FREE_FIELDS, *_OF_TRAINING)
    fields = {n: v for n, v in flat(raw.to_dict()).items() if not n.startswith(free)}
    settings = {"config": json.loads(json.dumps(fields)), "rollouts": count}
    if restart:
        log.unlink(missing_ok=True)
    refuse_other(log, settings)  # before anything is computed
    if not (workdir or log.exists()) and differing_in_part(log, settings):
        # Encoder and index beside the log are of other settings.
        for name in (FOLDER, INDEX):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / PASSAGES).unlink(missing_ok=True)
        begin(log, settings)
    with _opened(config, folder) as (system, models, stop):
        inputs = system.inputs
        params = placement.place(inputs.encoder.trained, system.learner.shardings.params)
        if workdir:
            params, _ = checkpoint_params(system, workdir, checkpoint)
        settings |= {
            "data": inputs.data,
            "weights": encoder_key((params, inputs.encoder.stored), {}),
            "answers depend on": json.loads(json.dumps(models.provenance)),
        }
        kept = REWARDS.read_partial(log)
        if (rows := [judged(row, least_std) for row in kept]) != kept:
            REWARDS.rewrite(log, rows)

        def play(params: Any, part: Sequence[Gold], first: int) -> list[RewardRow]:
            played = system.play(params, system.starts(part, count, _FILTERED, first), stop)
            golds = [gold for gold in part for _ in range(count)]
            scores = models.scores(golds, played, inputs.index.corpus, system.watch(stop))
            rewards = [
                each.cause if isinstance(each, Unscored) else config.reward.rewards.total(each)
                for each in scores
            ]
            return [
                reward_row(
                    (gold.id, gold.question), rewards[n * count : (n + 1) * count], least_std
                )
                for n, gold in enumerate(part)
            ]

        asked = Questions(
            REWARDS,
            inputs.train,
            lambda row, gold: (row.id, row.question) == (gold.id, gold.question),
            max(1, AT_ONCE // count),
        )
        way = Way(log.stem, "rewards", play, lambda: params)
        asked.into(log, way, settings, stop, restart=False)
    return REWARDS.read(log)

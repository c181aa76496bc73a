"""Scores a HARR run: its agent answers the evaluation questions, with three retrievers.

They are the one that was trained, the encoder that it started from in the same states, and this
encoder by the sub-query alone. All search greedily. `filter_questions` finds the training questions
whose reward varies between episodes of one policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.agents import agent_row
from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.feedback.llm import Unscored
from qrag_jax.learners import placement
from qrag_jax.metrics.bootstrap import columns_text, interval_cells, named, paired_interval
from qrag_jax.metrics.row_log import begin, differing_in_part, refuse_other
from qrag_jax.metrics.rows import AGENTS, REWARDS, AgentRow, RewardRow
from qrag_jax.metrics.summaries import agent_summary, judged, pass_at, reward_row
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.rollouts.agents import Episode, Start
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import ask_determinism
from qrag_jax.runtime.saved_config import flat
from qrag_jax.systems.harr import Harr
from qrag_jax.systems.harr_config import FREE_FIELDS, HarrConfig
from qrag_jax.systems.harr_inputs import (
    INDEX,
    PASSAGES,
    Asked,
    HarrModels,
    load_inputs,
    open_models,
)
from qrag_jax.systems.q_rag_scoring import DATA
from qrag_jax.systems.scoring import PlayedParts, ScoreOptions, are_others, of_others, write_summary

_OF_QUESTIONS = ("data.path", "data.sources", "eval.path")
AT_ONCE = 256  # questions played side by side, and written together
_SAMPLED = 2**31 - 2  # in place of a step's number: of draws for pass@k
_STATELESS = "untrained, the sub-query alone"


def score_agent(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    _check_trained(workdir)
    given = given.copy_and_resolve_references()
    are_others(workdir, given, DATA, options.out)
    others = bool(of_others(workdir, given, _OF_QUESTIONS))
    chose = report_on(given, options.samples, others=others)
    given.questions.kept = ""  # only training needs it
    config = HarrConfig.of(given)
    with _opened(config, workdir) as (system, models, stop):
        inputs = system.inputs
        alone = dataclasses.replace(config.state, stateful=False)
        stateless = Harr(dataclasses.replace(config, state=alone), system.mesh, inputs, models)
        params, step = checkpoint_params(system, workdir, options.checkpoint)
        first = placement.place(inputs.encoder.trained, system.learner.shardings.params)
        label = f"trained, {options.checkpoint} checkpoint of step {step}"
        ways = {_STATELESS: (stateless, first), "untrained": (system, first)}
        ways[label] = (system, params)
        out = options.out or workdir / "eval"
        record = _record(given, inputs.data, [each.gold.id for each in inputs.dev], options)
        record["answers depend on"] = json.loads(json.dumps(models.provenance))
        played: dict[str, list[AgentRow]] = {}
        for name, (how, weights) in ways.items():
            folder = f"{options.checkpoint}-{step}" if name == label else name.replace(", ", "-")
            log = out / folder.replace(" ", "-") / f"agent_seed{config.eval.seed}.jsonl"
            sampled = options.sampled if name == label else 0
            own = {"way": name, "weights": encoder_key(weights, {})}
            parts = played_parts(how, weights, sampled, stop)
            parts.into(log, record | own, stop, restart=options.restart)
            played[name] = AGENTS.read(log)
    summary: dict[str, Any] = {"checkpoint": options.checkpoint, "step": step}
    summary["questions"] = inputs.drawn.summary(chose, others=others)
    summary["scores"] = {name: agent_summary(rows) for name, rows in played.items()}
    summary["gains"] = {
        name: _gains(played[label], rows) for name, rows in played.items() if name != label
    }
    if options.sampled:
        summary["pass@k"] = _passes(played[label], options.sampled)
    summary = write_summary(out, given, summary)
    print(_table(summary))
    print(summary["questions"]["line"])
    print(f"logs and summary: {out}")
    return summary


@contextlib.contextmanager
def _opened(config: HarrConfig, folder: Path) -> Iterator[tuple[Harr, HarrModels, StopSignal]]:
    """The system with the encoder and the index of a folder."""
    if told := ask_determinism(config.runtime.deterministic):
        print(told)
    mesh = make_mesh(config.runtime.mesh)
    with StopSignal() as stop, open_models(config, folder) as models:
        inputs = load_inputs(config, folder, mesh, stop, is_kept=True)
        models.wait(stop)
        yield Harr(config, mesh, inputs, models), models, stop


def _check_trained(workdir: Path) -> None:
    if not (workdir / FOLDER).exists():
        raise InputError(f"{workdir} holds no encoder; --workdir must be a run that was trained.")


def checkpoint_params(system: Harr, workdir: Path, name: str) -> tuple[Any, int]:
    """The trained parameters of a run's checkpoint "best" or "last", and its step."""
    template = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        system.inputs.encoder.trained,
        system.learner.shardings.params,
    )
    return Checkpoints(workdir, read_only=True).restore_params(name, template)


def _record(
    given: ConfigDict, data: dict[str, str], ids: Sequence[str], options: ScoreOptions
) -> dict[str, Any]:
    """All that the rows of a log depend on, besides the weights and the states they read."""
    free = (
        *("train", "optimizer", "runtime", "profile", "grpo", "ppo"),
        *("llm", "reranker", "questions"),
    )
    config = {name: value for name, value in given.to_dict().items() if name not in free}
    return {
        "config": json.loads(json.dumps(config)),
        "data": data,
        "questions": len(ids),
        "sampled": options.sampled,
    }


def played_parts(
    system: Harr, params: Any, sampled: int, stop: StopSignal
) -> PlayedParts[Asked, AgentRow]:
    """How all questions are played."""
    player = system.player

    def play(part: Sequence[Asked], first: int) -> list[AgentRow]:
        starts = player.starts(part, 1, _SAMPLED, first)
        episodes = player.play(params, starts, stop, is_greedy=True)
        rows = [agent_row(each.gold, episode) for each, episode in zip(part, episodes)]
        if not sampled:
            return rows
        drawn = player.play(params, player.starts(part, sampled, _SAMPLED, first), stop)
        return [
            _with_samples(row, each, drawn[i * sampled : (i + 1) * sampled])
            for i, (row, each) in enumerate(zip(rows, part, strict=True))
        ]

    return PlayedParts(
        rows=AGENTS,
        asked=system.inputs.dev,
        size=AT_ONCE,
        play=play,
        is_of=lambda row, asked: row.id == asked.gold.id,
        names=("question", "questions"),
    )


def _with_samples(row: AgentRow, asked: Asked, drawn: Sequence[Episode]) -> AgentRow:
    scored = [agent_row(asked.gold, episode) for episode in drawn]
    whole = [each for each in scored if not each.failed]
    right = sum(each.em > 0 for each in whole)
    return dataclasses.replace(row, right=right, sampled=len(whole))


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


def _table(summary: dict[str, Any]) -> str:
    columns = ("em", "f1", "recall", "hops")
    lines = [["", *columns, *(losses := ("broken", "failed"))]]
    for name, scores in summary["scores"].items():
        cells = interval_cells(scores, columns, "")
        lost = (f"{scores[each]} of {scores['questions']}" for each in losses)
        lines.append([name, *cells, *lost])
    for name, gains in summary["gains"].items():
        cells = interval_cells(gains, columns, "", sign=True)
        lines.append([f"gain over {name}", *cells, *("" for _ in losses)])
    text = columns_text(lines)
    if "pass@k" in summary:
        passes = ", ".join(f"{k}: {value:.3f}" for k, value in summary["pass@k"].items())
        text.append(f"pass@k of drawn passages: {passes}")
    return "\n".join(text)


_FILTERED = 2**31 - 3  # in place of a step's number: no step has it, and no evaluation
# Sections of the config that a first policy's episodes do not depend on.
_OF_TRAINING = ("train.", "optimizer.", "grpo.", "ppo.", "algorithm", "eval.", "questions.")


@dataclasses.dataclass(frozen=True)
class FilterOptions:
    """What is played, and where the rewards are written."""

    out: Path  # the log, `….jsonl`
    rollouts: int = 8  # episodes of each question
    least_std: float = 0.0  # a question is kept if its rewards have a greater standard deviation
    workdir: Path | None = None  # of a run, whose checkpoint plays; None: the first encoder
    checkpoint: str = "best"  # or "last", of this run
    restart: bool = False  # throw the log away instead of going on with it

    def __post_init__(self) -> None:
        if self.out.suffix != ".jsonl":
            raise InputError(f"--out={self.out} is not named as JSON lines; give a name.jsonl.")
        if self.rollouts < 2:
            raise InputError(
                f"--rollouts is {self.rollouts}, but a reward varies only between episodes; give "
                "2 or more."
            )
        if not (math.isfinite(self.least_std) and self.least_std >= 0):
            raise InputError(f"--least_std is {self.least_std}; give a number, 0 or more.")

    @property
    def folder(self) -> Path:
        """Holds encoder and index: that of the run, or one beside the log."""
        return self.workdir or self.out.with_suffix(".files")


def filter_questions(given: ConfigDict, options: FilterOptions) -> list[RewardRow]:
    """Plays all training questions that the log lacks; returns the rows of all.

    GRPO learns nothing from a question whose episodes all have the same reward. Every question is
    played several times, and its rewards are logged. The draws of an episode depend on the number
    of its question and of its member alone.
    """
    given = given.copy_and_resolve_references()
    given.questions.kept = ""  # also those that were left out are played again
    config, log = HarrConfig.of(given), options.out
    if options.workdir:
        _check_trained(options.workdir)
    settings = _settings(given, options.rollouts)
    if options.restart:
        log.unlink(missing_ok=True)
    refuse_other(log, settings)  # before anything is computed
    if not options.workdir:
        _prepare_folder(options, settings)
    with _opened(config, options.folder) as (system, models, stop):
        inputs = system.inputs
        params = placement.place(inputs.encoder.trained, system.learner.shardings.params)
        if options.workdir:
            params, _ = checkpoint_params(system, options.workdir, options.checkpoint)
        own = {
            "data": inputs.data,
            "weights": encoder_key((params, inputs.encoder.stored), {}),
            "answers depend on": json.loads(json.dumps(models.provenance)),
        }
        _judge_again(log, options.least_std)
        _filtered(system, params, options, stop).into(log, settings | own, stop, restart=False)
    return REWARDS.read(log)


def _settings(given: ConfigDict, rollouts: int) -> dict[str, Any]:
    """What the rewards depend on, besides data and weights."""
    free = (*FREE_FIELDS, *_OF_TRAINING)
    config = {n: v for n, v in flat(given.to_dict()).items() if not n.startswith(free)}
    return {"config": json.loads(json.dumps(config)), "rollouts": rollouts}


def _prepare_folder(options: FilterOptions, settings: dict[str, Any]) -> None:
    """Deletes encoder and index beside the log if these are of other settings."""
    if not options.out.exists() and differing_in_part(options.out, settings):
        for name in (FOLDER, INDEX):
            shutil.rmtree(options.folder / name, ignore_errors=True)
        (options.folder / PASSAGES).unlink(missing_ok=True)
        begin(options.out, settings)


def _judge_again(log: Path, least_std: float) -> None:
    """Gives the rows of a log this threshold."""
    found = REWARDS.read_partial(log)
    rows = [judged(row, least_std) for row in found]
    if rows != found:
        REWARDS.rewrite(log, rows)


def _filtered(
    system: Harr, params: Any, options: FilterOptions, stop: StopSignal
) -> PlayedParts[Asked, RewardRow]:
    count = options.rollouts

    def play(part: Sequence[Asked], first: int) -> list[RewardRow]:
        starts = system.player.starts(part, count, _FILTERED, first)
        rewards = _rewards(system, params, part, starts, stop)
        return [
            reward_row(
                (each.gold.id, each.gold.question),
                rewards[place * count : (place + 1) * count],
                options.least_std,
            )
            for place, each in enumerate(part)
        ]

    return PlayedParts(
        rows=REWARDS,
        asked=system.inputs.train,
        size=max(1, AT_ONCE // count),
        play=play,
        is_of=lambda row, each: (row.id, row.question) == (each.gold.id, each.gold.question),
        names=("question", "questions"),
    )


def _rewards(
    system: Harr, params: Any, asked: Sequence[Asked], starts: Sequence[Start], stop: StopSignal
) -> list[float | str]:
    """The reward of each episode, or why it has none."""
    golds = [each.gold for each in asked for _ in range(len(starts) // len(asked))]
    played = system.player.play(params, starts, stop)
    total = system.config.reward.rewards.total
    return [
        each.cause if isinstance(each, Unscored) else total(each)
        for each in system.rewards.scores(golds, played, system.player.watch(stop))
    ]

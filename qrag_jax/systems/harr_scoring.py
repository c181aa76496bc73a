"""Scores a HARR run: its agent answers the evaluation questions, with three retrievers.

They are the one that was trained, the encoder that it started from in the same states, and this
encoder by the sub-query alone. All search greedily. `filter_questions` finds the training questions
whose reward varies between episodes of one policy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.environments.rag.episode import Task
from qrag_jax.errors import InputError
from qrag_jax.evaluators.agents import agent_row
from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.feedback.llm import Unscored
from qrag_jax.learners import placement
from qrag_jax.metrics import agent_log, answer_log, reward_log
from qrag_jax.metrics.agent_log import AgentRow, pass_at, summarised
from qrag_jax.metrics.bootstrap import columns_text, interval_text, paired_interval
from qrag_jax.metrics.reward_log import RewardRow
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.rollouts.agents import Episode, Start
from qrag_jax.rollouts.schedule import draw_keys
from qrag_jax.runtime import determinism
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.saved_config import flat
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.harr import Harr
from qrag_jax.systems.harr_config import FREE_FIELDS, HarrConfig
from qrag_jax.systems.harr_inputs import INDEX, PASSAGES, Asked, load_inputs
from qrag_jax.systems.harr_models import open_models
from qrag_jax.systems.q_rag_scoring import DATA
from qrag_jax.systems.scoring import PlayedParts, ScoreOptions, are_others, of_others, write_summary

_OF_QUESTIONS = ("data.path", "data.sources", "eval.path")
AT_ONCE = 256  # questions played side by side, and written together
_SAMPLED = 2**31 - 2  # in place of a step's number: of draws for pass@k
_STATELESS = "untrained, the sub-query alone"


def score_agent(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    if not (workdir / FOLDER).exists():
        raise InputError(f"{workdir} holds no encoder; --workdir must be a run that was trained.")
    given = given.copy_and_resolve_references()
    are_others(workdir, given, DATA, options.out)
    others = bool(of_others(workdir, given, _OF_QUESTIONS))
    chose = report_on(given, options.samples, others=others)
    given.questions.kept = ""  # only training needs it
    config = HarrConfig.of(given)
    if told := determinism.ask(config.runtime.deterministic):
        print(told)
    mesh = make_mesh(config.runtime.mesh)
    with open_models(config, workdir) as models, StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, stop, is_kept=True)
        models.wait(stop)
        system = Harr(config, mesh, inputs, models)
        alone = dataclasses.replace(config.state, stateful=False)
        stateless = Harr(dataclasses.replace(config, state=alone), mesh, inputs, models)
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
            played[name] = agent_log.LOG.read(log)
    summary: dict[str, Any] = {"checkpoint": options.checkpoint, "step": step}
    summary["questions"] = inputs.drawn.summary(chose, others=others)
    summary["scores"] = {name: summarised(rows) for name, rows in played.items()}
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
        rows=agent_log.LOG,
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
            mean, low, high = paired_interval(*np.transpose(pairs))
            gains[name] = {"mean": mean, "low": low, "high": high}
    return gains


def _passes(rows: Sequence[AgentRow], sampled: int) -> dict[str, float]:
    found = {}
    k = 1
    while k <= sampled:
        known = [row for row in rows if row.right is not None and row.sampled >= k]
        if known:
            each = [pass_at(k, row.right or 0, row.sampled) for row in known]
            found[str(k)] = float(np.mean(each))
        k *= 2
    return found


def _table(summary: dict[str, Any]) -> str:
    columns = ("em", "f1", "recall", "hops")
    lines = [["", *columns, *(losses := ("broken", "failed"))]]
    for name, scores in summary["scores"].items():
        cells = [interval_text(scores[c]) if c in scores else "" for c in columns]
        lost = (f"{scores[each]} of {scores['questions']}" for each in losses)
        lines.append([name, *cells, *lost])
    for name, gains in summary["gains"].items():
        cells = [interval_text(gains[c], sign=True) if c in gains else "" for c in columns]
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
    """What is played, and where the rewards are written.

    Attributes:
        out: the log, `….jsonl`.
        rollouts: episodes of each question.
        least_std: a question is kept if its rewards have a greater standard deviation.
        workdir: folder of a trained run, whose checkpoint plays; None: the config's first encoder.
        checkpoint: "best" or "last", of this run.
        restart: throw the log away instead of going on with it.
    """

    out: Path
    rollouts: int = 8
    least_std: float = 0.0
    workdir: Path | None = None
    checkpoint: str = "best"
    restart: bool = False

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
    if options.workdir and not (options.workdir / FOLDER).exists():
        raise InputError(
            f"{options.workdir} holds no encoder; --workdir must be a run that was trained."
        )
    if told := determinism.ask(config.runtime.deterministic):
        print(told)
    with StopSignal() as stop:
        settings = _settings(given, options.rollouts)
        if options.restart:
            log.unlink(missing_ok=True)
        agent_log.refuse_other(log, settings)  # before anything is computed
        folder = options.folder
        if not options.workdir:
            _prepare_folder(options, settings)
        mesh = make_mesh(config.runtime.mesh)
        with open_models(config, folder) as models:
            inputs = load_inputs(config, folder, mesh, stop, is_kept=True)
            models.wait(stop)
            system = Harr(config, mesh, inputs, models)
            params = placement.place(inputs.encoder.trained, system.learner.shardings.params)
            if options.workdir:
                params, _ = checkpoint_params(system, options.workdir, options.checkpoint)
            weights = encoder_key((params, inputs.encoder.stored), {})
            own = {
                "data": inputs.data,
                "weights": weights,
                "answers depend on": json.loads(json.dumps(models.provenance)),
            }
            _judge_again(log, options.least_std)
            _filtered(system, params, options, stop).into(log, settings | own, stop, restart=False)
    return answer_log.read_partial(log, RewardRow)


def _settings(given: ConfigDict, rollouts: int) -> dict[str, Any]:
    """What the rewards depend on, besides data and weights."""
    free = (*FREE_FIELDS, *_OF_TRAINING)
    config = {n: v for n, v in flat(given.to_dict()).items() if not n.startswith(free)}
    return {"config": json.loads(json.dumps(config)), "rollouts": rollouts}


def _prepare_folder(options: FilterOptions, settings: dict[str, Any]) -> None:
    """Deletes encoder and index beside the log if these are of other settings."""
    if not options.out.exists() and not agent_log.has_record(options.out, settings):
        for name in (FOLDER, INDEX):
            shutil.rmtree(options.folder / name, ignore_errors=True)
        (options.folder / PASSAGES).unlink(missing_ok=True)
        agent_log.begin(options.out, settings, restart=False)


def _judge_again(log: Path, least_std: float) -> None:
    """Gives the rows of a log this threshold."""
    found = answer_log.read_partial(log, RewardRow)
    rows = [reward_log.judged(row, least_std) for row in found]
    if rows != found:
        write_whole(log, answer_log.encoded(rows))


def _filtered(
    system: Harr, params: Any, options: FilterOptions, stop: StopSignal
) -> PlayedParts[Asked, RewardRow]:
    count = options.rollouts

    def play(part: Sequence[Asked], first: int) -> list[RewardRow]:
        starts = _starts(system.config.seed, first, part, count)
        rewards = _rewards(system, params, part, starts, stop)
        return [
            reward_log.row(
                (each.gold.id, each.gold.question),
                rewards[place * count : (place + 1) * count],
                options.least_std,
            )
            for place, each in enumerate(part)
        ]

    return PlayedParts(
        rows=RowLog(RewardRow, "give --restart, or delete the file", ascii=True),
        asked=system.inputs.train,
        size=max(1, AT_ONCE // count),
        play=play,
        is_of=lambda row, each: (row.id, row.question) == (each.gold.id, each.gold.question),
        names=("question", "questions"),
    )


def _starts(seed: int, first: int, asked: Sequence[Asked], rollouts: int) -> list[Start]:
    """Episodes of the questions `first`, `first + 1`, …"""
    key = jax.random.fold_in(jax.random.key(seed), _FILTERED)
    numbers = np.arange(first, first + len(asked), dtype=np.uint32)
    data = np.asarray(draw_keys(key, numbers, rollouts))
    return [
        Start(Task(each.gold.id, each.gold.question), first + place, data[place, member])
        for place, each in enumerate(asked)
        for member in range(rollouts)
    ]


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

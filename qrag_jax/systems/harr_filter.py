"""Finds the training questions of HARR whose reward varies between episodes of one policy.

GRPO learns nothing from a question whose episodes all have the same reward. Every question is
played several times, and its rewards are logged. The draws of an episode depend on the number of
its question and of its member alone.
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
from tqdm import tqdm

from qrag_jax.environments.rag.episode import Task
from qrag_jax.errors import InputError
from qrag_jax.feedback.language_model import Unscored
from qrag_jax.learners import placement
from qrag_jax.metrics import agent_log, answer_log, reward_log
from qrag_jax.metrics.reward_log import RewardRow
from qrag_jax.models.first_encoder import FOLDER
from qrag_jax.rollouts.agents import Start
from qrag_jax.rollouts.draw_keys import draw_keys
from qrag_jax.runtime import determinism
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.locks import log_locks
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.saved_config import flat
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.harr import Harr
from qrag_jax.systems.harr_config import FREE_FIELDS, HarrConfig
from qrag_jax.systems.harr_inputs import INDEX, PASSAGES, Asked, load_inputs
from qrag_jax.systems.harr_models import open_models
from qrag_jax.systems.harr_scoring import checkpoint_params

_AT_ONCE = 256  # episodes played side by side, and written together
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

    Raises:
        Stopped: a signal came; the same call goes on with the log.
        FeedbackLost: the agent's language model is gone, or too many episodes break.
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
    with StopSignal() as stop, log_locks(log):
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
            agent_log.begin(log, settings | own, restart=False)
            return _rows(system, params, options, stop)


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


def _rows(system: Harr, params: Any, options: FilterOptions, stop: StopSignal) -> list[RewardRow]:
    log, asked = options.out, system.inputs.train
    part = max(1, _AT_ONCE // options.rollouts)
    rows = _begun(log, asked, part, options.least_std)
    with tqdm(total=len(asked), initial=len(rows), unit="question", desc=log.stem) as bar:
        while len(rows) < len(asked):
            first = len(rows)
            playing = asked[first : first + part]
            starts = _starts(system.config.seed, first, playing, options.rollouts)
            rewards_of = _rewards(system, params, playing, starts, stop)
            new = []
            for place, each in enumerate(playing):
                members = slice(place * options.rollouts, (place + 1) * options.rollouts)
                rewards = rewards_of[members]
                named = each.gold.id, each.gold.question
                new.append(reward_log.row(named, rewards, options.least_std))
            answer_log.append(log, new)
            rows += new
            bar.update(len(new))
    return rows


def _begun(log: Path, asked: Sequence[Asked], part: int, least_std: float) -> list[RewardRow]:
    """The rows that a log has, of whole parts: what is computed may depend on all of a part."""
    found = answer_log.read_partial(log, RewardRow)
    names = [(each.gold.id, each.gold.question) for each in asked[: len(found)]]
    if [(row.id, row.question) for row in found] != names:
        raise InputError(f"{log} has other questions; give --restart to throw it away.")
    whole = len(found) if len(found) == len(asked) else len(found) // part * part
    rows = [reward_log.judged(row, least_std) for row in found[:whole]]
    if rows != found:
        write_whole(log, answer_log.encoded(rows))
    return rows


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

"""Plays a run's evaluation questions and writes every episode, token by token, into a file.

The draws of an episode depend on the numbers of its question and of its draw alone. A file is
written part by part, and what is computed may depend on all of a part; so a file that was broken
off goes on behind its last whole part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax.environments.tools.episode import ToolTask
from qrag_jax.errors import InputError
from qrag_jax.metrics import agent_log, answer_log, predictions
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.rollouts.draw_keys import draw_keys
from qrag_jax.rollouts.token_episodes import Library, TokenStart
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.locks import log_locks
from qrag_jax.systems.rlvr import Rlvr, TurnTexts, prediction_of
from qrag_jax.systems.rlvr_config import GRPO, SFT, RlvrConfig
from qrag_jax.systems.rlvr_inputs import fingerprint, load_inputs, open_library
from qrag_jax.systems.saved_token_run import FIRST, IMITATED, SavedWeights, Weights, mesh_of_run

_PREDICTED = 2**31 - 4  # in place of a step's number: no step has it, and no evaluation
# Sections of the config that episodes of given weights do not depend on. The questions have a
# digest of their own.
_OF_TRAINING = (
    *("train", "optimizer", "runtime", "profile", "demonstrations"),
    *("sft", "grpo", "stages", "eval", "questions", "llm"),
)


def played_config(given: ConfigDict) -> dict[str, Any]:
    """The sections of a config that episodes of given weights depend on, as JSON has them."""
    every = given.to_dict().items()
    return json.loads(json.dumps({name: each for name, each in every if name not in _OF_TRAINING}))


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """How a file of predictions is made.

    Attributes:
        sampled: episodes drawn for each question; 0: one, as `config.eval.greedy` says.
        restart: throw a file away instead of going on with it.
    """

    sampled: int = 0
    restart: bool = False


@dataclasses.dataclass(frozen=True)
class Player:
    """Predicts with the model of one run.

    Attributes:
        given: the config, with the questions that are asked.
        system: the run's.
        workdir: the run's folder; None: there is no run, and the model is untrained.
        stop: looked at while episodes are played.
        libraries: what the tools read, by the retriever's name.
    """

    given: ConfigDict
    system: Rlvr
    workdir: Path | None
    stop: StopSignal
    libraries: dict[str, Library]

    def weights(self, which: str) -> Weights | None:
        """The weights of one of `CHECKPOINTS`; None: there was no such end of a stage, or it is
        not kept.
        """
        saved = SavedWeights(self.system)
        if which == FIRST or self.workdir is None:
            return saved.untrained()
        if which == IMITATED:
            step = self.imitation_ends
            return saved.imitated(step, "after imitation") if step else None
        return saved.checkpoint(which)

    @property
    def imitation_ends(self) -> int:
        """The step at which a stage of rewards takes over from one of imitation; 0: none does."""
        both = {SFT, GRPO} <= set(self.system.config.stages)
        return self.system.config.sft_steps if both else 0

    def library(self, retriever: str) -> Library:
        """What the tools read with a retriever; it is made once."""
        if retriever not in self.libraries:
            config = self.system.config
            tools = dataclasses.replace(config.tools, retriever=retriever)
            other = dataclasses.replace(config, tools=tools)
            self.libraries[retriever] = open_library(other, self.system.mesh)
        return self.libraries[retriever]

    def predict(
        self, weights: Weights, log: Path, *, retriever: str, options: PredictOptions
    ) -> None:
        """Plays all questions that the file lacks.

        Args:
            log: the file, `….jsonl`; what it was made with is kept beside it, as `….json`.
            retriever: what the tool that searches uses.

        Raises:
            Stopped: a signal came; the same call goes on with the file.
            FeedbackLost: too many episodes fail.
        """
        library = self.library(retriever)
        record = self._record(weights, retriever, options)
        with log_locks(log):
            agent_log.begin(log, record, restart=options.restart)
            self._write(weights.params, library, log, options)

    def _record(self, weights: Weights, retriever: str, options: PredictOptions) -> dict[str, Any]:
        """All that the episodes depend on."""
        inputs, config = self.system.inputs, played_config(self.given)
        config["tools"]["retriever"] = retriever
        return {
            "kind": predictions.KIND,
            "checkpoint": weights.told,
            "retriever": retriever,
            "questions": len(inputs.dev),
            "sampled": options.sampled,
            "greedy": self._greedy(options),
            "data": {
                "questions": fingerprint(inputs.dev),
            }
            | {name: key for name, key in inputs.data.items() if name != "questions"},
            "weights": encoder_key(weights.params, {}),
            "rewards": {**self.system.provenance},
            "config": config,
        }

    def _greedy(self, options: PredictOptions) -> bool:
        return not options.sampled and self.system.config.eval.greedy

    def _write(self, params: Any, library: Library, log: Path, options: PredictOptions) -> None:
        system, asked = self.system, self.system.inputs.dev
        config, draws = system.config, options.sampled or 1
        # As many episodes side by side as in training, whose memory is known to suffice.
        part = max(1, config.train.batch_size * config.grpo.members // draws)
        done, turns = _begun(log, asked, draws, part), TurnTexts(system.inputs.speech)
        with tqdm(total=len(asked), initial=done, unit="question", desc=log.stem) as bar:
            while done < len(asked):
                tasks = asked[done : done + part]
                starts = _starts(config.seed, done, tasks, draws)
                greedy = self._greedy(options)
                episodes = system.player.on_device(
                    params, starts, self.stop, greedy=greedy, library=library
                )
                new = []
                for place, (start, episode) in enumerate(zip(starts, episodes, strict=True)):
                    number, draw = done + place // draws, place % draws
                    trajectory = system.trajectory(episode, number, draw, start.task)
                    new.append(prediction_of(start.task, trajectory, turns))
                answer_log.append(log, new)
                done += len(tasks)
                bar.update(len(tasks))


@contextlib.contextmanager
def open_player(given: ConfigDict, workdir: Path | None, folder: Path) -> Iterator[Player]:
    """Opens the model of a run, or that of a config, and the questions to ask.

    Args:
        given: the config; `questions.dev` and `eval.samples` say what is asked.
        workdir: the run's folder; None: the config's own model, untrained.
        folder: where a tiny model is, or is made.
    """
    config = RlvrConfig.of(given)
    if config.env.verifiers:
        raise InputError(
            f"the run's environment is {config.env.verifiers!r} (config.env.verifiers), whose "
            "episodes are played and written by `qrag evaluate`; give that command."
        )
    mesh = mesh_of_run(config, workdir)
    with StopSignal() as stop:
        inputs = load_inputs(config, folder, mesh, trains=False)
        libraries: dict[str, Library] = {config.tools.retriever: inputs.library}
        yield Player(given, Rlvr(config, mesh, inputs, folder), workdir, stop, libraries)


def _begun(log: Path, asked: Sequence[ToolTask], draws: int, part: int) -> int:
    """How many questions a file has, of whole parts; what is behind these is dropped."""
    if not log.exists():
        return 0
    ends = [0]  # bytes up to the end of each line
    with log.open("rb") as file:
        fix = "give --restart to throw the file away"
        for row, size in answer_log.each_line(file, log, Prediction, fix):
            question, draw = divmod(len(ends) - 1, draws)
            if question >= len(asked) or (row.id, row.draw) != (asked[question].id, draw):
                raise InputError(f"{log} has other questions; {fix}.")
            ends.append(ends[-1] + size)
    whole = (len(ends) - 1) // draws
    if whole < len(asked):
        whole = whole // part * part
    os.truncate(log, ends[whole * draws])
    return whole


def _starts(seed: int, first: int, tasks: Sequence[ToolTask], draws: int) -> list[TokenStart]:
    """Episodes of the questions `first`, `first + 1`, …"""
    key = jax.random.fold_in(jax.random.key(seed), _PREDICTED)
    numbers = np.arange(first, first + len(tasks), dtype=np.uint32)
    keys = np.asarray(draw_keys(key, numbers, draws))
    return [
        TokenStart(task, keys[place, draw])
        for place, task in enumerate(tasks)
        for draw in range(draws)
    ]

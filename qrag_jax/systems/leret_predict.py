"""Plays questions by the query writer of a run, and writes what each hop found into a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.data.files.leret import write_records
from qrag_jax.errors import InputError
from qrag_jax.evaluators.query_scores import logged
from qrag_jax.metrics import hop_log
from qrag_jax.metrics.hop_log import Searched
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import SFT, LeretConfig
from qrag_jax.systems.leret_files import records_of
from qrag_jax.systems.leret_inputs import CORPUS, OF_QUESTIONS, fingerprint, load_inputs
from qrag_jax.systems.own_questions import of_others
from qrag_jax.systems.played_parts import PlayedParts
from qrag_jax.systems.saved_token_run import (
    FIRST,
    IMITATED,
    SavedWeights,
    Weights,
    digest_of_weights,
    mesh_of_run,
)

KIND = "hops of a query writer"  # in the record beside a file
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "tries", "reward", "seed")


@dataclasses.dataclass(frozen=True)
class HopPredictor:
    """Predicts with the model of one run.

    Attributes:
        given: the config, with the questions that are asked.
        system: the run's.
        stop: looked at between parts.
    """

    given: ConfigDict
    system: Leret
    stop: StopSignal

    def weights(self, which: str) -> Weights | None:
        """The weights of "best", "last", "first" or "sft".

        "sft" are those at the end of the first stage of SFT. None: there was no such stage, or its
        end is not kept.

        Raises:
            InputError: the run has no sound checkpoint.
        """
        saved = SavedWeights(self.system)
        if which == FIRST:
            return saved.untrained()
        if which == IMITATED:
            plan = self.system.config.plan
            ends = [each.first + each.steps for each in plan if each.kind == SFT]
            return saved.imitated(ends[0], "after sft") if ends else None
        return saved.checkpoint(which)

    def predict(self, weights: Weights, log: Path, *, restart: bool = False) -> list[Searched]:
        """Plays all questions that the file lacks; returns all rows.

        Args:
            log: the file, `….jsonl`; what it was made with is kept beside it, as `….json`.
            restart: throw the file away instead of going on with it.

        Raises:
            InputError: the file is of other settings, questions or weights.
            Stopped: a signal came; the same call goes on with the file.
            FeedbackLost: too many tries fail.
        """
        system = self.system
        config = system.config
        play = system.by_device(weights.params, self.stop, greedy=config.eval.greedy)
        parts = PlayedParts(
            rows=hop_log.LOG,
            asked=system.inputs.dev,
            size=config.tries.questions,  # as many as in training, whose memory suffices
            play=lambda states, stream: logged(states, system.hops.by_model(states, play, stream)),
            is_of=lambda row, state: row.id == state.id,
            names=("question", "questions"),
        )
        return parts.into(log, self._record(weights), self.stop, restart=restart)

    def write_records(self, rows: list[Searched], path: Path) -> None:
        """Writes the rows of all questions as LeReT's records; see `data.files.leret`.

        Raises:
            OSError: the file cannot be written.
        """
        inputs = self.system.inputs
        write_records(path, records_of(rows, inputs.dev, inputs.library.corpus))

    def _record(self, weights: Weights) -> dict[str, Any]:
        """All that the rows depend on."""
        inputs, every = self.system.inputs, json.loads(json.dumps(self.given.to_dict()))
        return {
            "kind": KIND,
            "checkpoint": weights.told,
            "questions": fingerprint(inputs.dev),
            "data": {name: key for name, key in inputs.data.items() if name != "questions"},
            "weights": digest_of_weights(weights.params),
            "greedy": self.system.config.eval.greedy,
            **{name: every[name] for name in _OF_PLAY},
        }


def pool_beside(workdir: Path, given: ConfigDict, out: Path | None) -> Path | None:
    """The folder of the pooled passages of other questions than the run's; None: the run's pool.

    Args:
        out: the file that is named for them; None: none is.

    Raises:
        InputError: the questions are not the run's, and no file is named.
    """
    differing = of_others(workdir, given, OF_QUESTIONS)
    if differing and out is None:
        raise InputError(
            f"what is asked is not the run's own (not as in its config: {', '.join(differing)}); "
            "give the file to write, for example --out=predictions.jsonl."
        )
    return out.with_suffix(f".{CORPUS}") if differing and out else None


@contextlib.contextmanager
def open_hop_predictor(
    given: ConfigDict, workdir: Path, *, trains: bool = False, pool: Path | None = None
) -> Iterator[HopPredictor]:
    """Opens the model of a run, and the questions to ask.

    Args:
        given: the config; `questions.dev` and `eval.samples` say what is asked.
        workdir: the run's folder.
        trains: whether the training questions are needed, too.
        pool: see `pool_beside`.

    Raises:
        InputError: the run, its model or the data cannot be used.
    """
    config = LeretConfig.of(given)
    mesh = mesh_of_run(config, workdir)
    with StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, trains=trains, pool=pool)
        yield HopPredictor(given, Leret(config, mesh, inputs, workdir), stop)

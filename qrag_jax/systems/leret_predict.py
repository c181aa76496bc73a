"""Plays questions by the query writer of a run, and writes what each hop found into a file.

Questions are played part by part, and the draws of a question depend on the numbers of its part and
of its place there alone. What is computed may depend on all of a part; so a file that was broken
off goes on behind its last whole part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax.data.files.leret import write_records
from qrag_jax.errors import InputError
from qrag_jax.evaluators.query_scores import logged
from qrag_jax.learners import placement
from qrag_jax.metrics import agent_log, hop_log
from qrag_jax.metrics.hop_log import Searched
from qrag_jax.models.first_language_model import FOLDER
from qrag_jax.runtime import determinism
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.compilation import enable_persistent_cache
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.locks import log_locks
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.run import log as tell
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import SFT, LeretConfig
from qrag_jax.systems.leret_files import records_of
from qrag_jax.systems.leret_inputs import CORPUS, fingerprint, load_inputs
from qrag_jax.systems.leret_scoring import OF_QUESTIONS
from qrag_jax.systems.leret_tries import digest_of_weights
from qrag_jax.systems.own_questions import of_others

FIRST, IMITATED = "first", "sft"  # of a run's checkpoints, beside "best" and "last"
KIND = "hops of a query writer"  # in the record beside a file
_PREDICTED = 2**30  # of the draws; each part has the next
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "tries", "reward", "seed")


@dataclasses.dataclass(frozen=True)
class HopWeights:
    """Weights that play.

    Attributes:
        name: of the file that they write, such as "best-120".
        told: what people are told of them.
        params: on the mesh.
    """

    name: str
    told: str
    params: Any


@dataclasses.dataclass(frozen=True)
class HopPredictor:
    """Predicts with the model of one run.

    Attributes:
        given: the config, with the questions that are asked.
        system: the run's.
        workdir: the run's folder.
        stop: looked at between parts.
    """

    given: ConfigDict
    system: Leret
    workdir: Path
    stop: StopSignal

    def weights(self, which: str) -> HopWeights | None:
        """The weights of "best", "last", "first" or "sft".

        "sft" are those at the end of the first stage of SFT. None: there was no such stage, or its
        end is not kept.

        Raises:
            InputError: the run has no sound checkpoint.
        """
        system = self.system
        trained, shardings = system.inputs.model.trained, system.param_shardings
        if which == FIRST:
            return HopWeights("untrained", "untrained", placement.place(trained, shardings))
        template = placement.shapes_on(trained, shardings)
        checkpoints = Checkpoints(self.workdir, read_only=True)
        if which == IMITATED:
            ends = [each.first + each.steps for each in system.config.plan if each.kind == SFT]
            found = checkpoints.restore_params_of(ends[0], template) if ends else None
            if found is None:
                return None
            return HopWeights(f"sft-{ends[0]}", f"after sft, step {ends[0]}", found)
        params, step = checkpoints.restore_params(which, template)
        return HopWeights(f"{which}-{step}", f"{which} checkpoint of step {step}", params)

    def predict(self, weights: HopWeights, log: Path, *, restart: bool = False) -> list[Searched]:
        """Plays all questions that the file lacks; returns all rows.

        Args:
            log: the file, `….jsonl`; what it was made with is kept beside it, as `….json`.
            restart: throw the file away instead of going on with it.

        Raises:
            InputError: the file is of other settings, questions or weights.
            Stopped: a signal came; the same call goes on with the file.
            FeedbackLost: too many tries fail.
        """
        with log_locks(log):
            agent_log.begin(log, self._record(weights), restart=restart)
            return self._written(weights, log)

    def write_records(self, rows: list[Searched], path: Path) -> None:
        """Writes the rows of all questions as LeReT's records; see `data.files.leret`.

        Raises:
            OSError: the file cannot be written.
        """
        inputs = self.system.inputs
        write_records(path, records_of(rows, inputs.dev, inputs.library.corpus))

    def _record(self, weights: HopWeights) -> dict[str, Any]:
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

    def _written(self, weights: HopWeights, log: Path) -> list[Searched]:
        system, asked = self.system, self.system.inputs.dev
        config = system.config
        part = config.tries.questions  # as many side by side as in training, whose memory suffices
        play = system.by_device(weights.params, self.stop, greedy=config.eval.greedy)
        rows = hop_log.read_parts(log, part, len(asked))
        if [row.id for row in rows] != [state.id for state in asked[: len(rows)]]:
            raise InputError(f"{log} has other questions; give --restart to throw it away.")
        with tqdm(total=len(asked), initial=len(rows), unit="question", desc=log.stem) as bar:
            while len(rows) < len(asked):
                self.stop.check()
                states = asked[len(rows) : len(rows) + part]
                stream = _PREDICTED + len(rows) // part
                new = logged(states, system.hops.by_model(states, play, stream))
                hop_log.append(log, new)
                rows += new
                bar.update(len(new))
        return rows


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
    if not config.model.path and not (workdir / FOLDER).exists():
        raise InputError(f"{workdir} holds no model; --workdir must be a run that was trained.")
    if told := determinism.ask(config.runtime.deterministic):
        tell(told)
    if os.access(workdir, os.W_OK):  # a read-only run is played without the cache
        enable_persistent_cache(workdir / "compilation_cache")
    mesh = make_mesh(config.runtime.mesh)
    with StopSignal() as stop:
        inputs = load_inputs(config, workdir, mesh, trains=trains, pool=pool)
        yield HopPredictor(given, Leret(config, mesh, inputs, workdir), workdir, stop)

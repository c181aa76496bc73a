"""A trained run of a language model, for the commands that play it: its mesh and its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from jax.sharding import Mesh

from qrag_jax.errors import InputError
from qrag_jax.learners import placement
from qrag_jax.models.first_language_model import FOLDER
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.scoring import Questions, Way
from qrag_jax.systems.token_config import TokenConfig
from qrag_jax.systems.token_system import TokenSystem

# Of a run's weights: its checkpoints, what training began with, what imitation ended with.
BEST, LAST, FIRST, IMITATED = CHECKPOINTS = ("best", "last", "first", "sft")


def mesh_of_run(config: TokenConfig, workdir: Path | None) -> Mesh:
    """The mesh on which the model of a run plays; compiled programs are kept in the run's folder.

    Args:
        workdir: the run's folder; None: there is no run, and the config's own model plays.
    """
    if workdir and not config.model.path and not (workdir / FOLDER / "config.json").exists():
        raise InputError(f"{workdir} holds no model; --workdir must be a run that was trained.")
    return config.mesh()


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights that play."""

    name: str  # of what they write, such as "best-120"
    told: str  # what people are told of them
    step: int
    params: Any

    @property
    def digest(self) -> str:
        """To know them again."""
        return encoder_key(self.params, {})


@dataclasses.dataclass(frozen=True)
class SavedWeights:
    """The weights that a run keeps."""

    system: TokenSystem[Any, Any]

    def untrained(self) -> Weights:
        """Those that training began with."""
        return Weights("untrained", "untrained", 0, self.system.untrained)

    def checkpoint(self, which: str) -> Weights:
        """Those of the "best" or the "last" checkpoint."""
        params, step = self._checkpoints.restore_params(which, self._template)
        return Weights(f"{which}-{step}", f"{which} checkpoint of step {step}", step, params)

    def after(self, step: int) -> Any | None:
        """The parameters at the end of the stage of which this is the last step; None: not kept."""
        return self._checkpoints.restore_params_of(step, self._template)

    def named(self, which: str, end: int, what: str) -> Weights | None:
        """The weights of one of `CHECKPOINTS`; None: imitation had no end, or it is not kept.

        Args:
            end: step of the end of imitation; 0: there was none.
            what: that is called, such as "after imitation".
        """
        if which != IMITATED:
            return self.untrained() if which == FIRST else self.checkpoint(which)
        params = self.after(end) if end else None
        return None if params is None else Weights(f"sft-{end}", f"{what}, step {end}", end, params)

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.system.workdir, read_only=True)

    @cached_property
    def _template(self) -> Any:
        return placement.shapes_on(self.system.inputs.model.trained, self.system.param_shardings)


System = TypeVar("System", bound=TokenSystem[Any, Any])
Asked = TypeVar("Asked")
Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class Predictor(Generic[System, Asked, Row]):
    """Plays questions with the model of one run."""

    system: System
    stop: StopSignal
    questions: Questions[Asked, Row]
    # (parameters, a part, number of its first) → its rows
    play: Callable[[Any, Sequence[Asked], int], Sequence[Row]]
    # The questions, and the fields that the play of given weights depends on
    settings: dict[str, Any]
    record: dict[str, Any]  # all else that the rows depend on, but for the weights
    # The step at which imitation ended, 0: there was none; and what that is called
    imitated: tuple[int, str]

    def weights(self, which: str) -> Weights | None:
        """The weights of one of `CHECKPOINTS`; see `SavedWeights.named`."""
        return SavedWeights(self.system).named(which, *self.imitated)

    def way(self, weights: Weights, name: str = "") -> Way[Row]:
        """The play of these weights into the log of this name."""
        record = {"checkpoint": weights.told, "weights": weights.digest}
        return Way(name, weights.told, self.play, lambda: weights.params, record)

    def predict(self, weights: Weights, log: Path, *, restart: bool = False) -> None:
        """Plays all that the file lacks."""
        record = self.settings | self.record
        self.questions.into(log, self.way(weights), record, self.stop, restart=restart)

"""A trained run of a language model, for the commands that play it: its mesh and its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.learners import placement
from qrag_jax.models.first_language_model import FOLDER
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.scoring import NOT_KEPT, Questions, ScoreOptions, Way, are_others
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


def searched_beside(
    workdir: Path, raw: ConfigDict, parts: Sequence[str], ending: str, out: Path | None
) -> Path | None:
    """The folder of what other questions than the run's search; None: the run's own.

    Args:
        parts: beginnings of the fields that say what is asked.
        ending: of the folder's name, which is else that of the file `out`, if this is named.
    """
    others = are_others(workdir, raw, parts, out, "FILE.jsonl")
    return out.with_suffix(f".{ending}") if out and others else None


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights that play."""

    name: str  # of what they write, such as "best-120"
    label: str  # shown in tables and logs
    step: int
    params: Any  # a text says why they are not here

    @property
    def digest(self) -> str:
        """To know them again."""
        return "" if isinstance(self.params, str) else encoder_key(self.params, {})


System = TypeVar("System", bound=TokenSystem[Any])
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
    record: dict[str, Any]  # all that the rows depend on, but for the weights
    # By the last step of an earlier stage, the name of its weights, and its label
    stages: Mapping[int, tuple[str, str]]
    imitated: int  # the step at which imitation ended; 0: there was none

    def weights(self, which: str) -> Weights:
        """The weights of one of `CHECKPOINTS`."""
        if which == FIRST:
            return Weights("untrained", "untrained", 0, self.system.untrained)
        if which != IMITATED:
            params, step = self._checkpoints.restore_params(which, self._template)
            return Weights(f"{which}-{step}", f"{which} checkpoint of step {step}", step, params)
        found = self.after(self.imitated) if self.imitated else None
        if found is None or isinstance(found.params, str):
            raise InputError(
                f"{self.system.workdir} keeps no checkpoint of the end of imitation; give "
                "--checkpoint=best, last or first."
            )
        return found

    def after(self, end: int) -> Weights:
        """The weights at the end of the stage of which this is the last step."""
        name, label = self.stages[end]
        params = self._checkpoints.restore_params_of(end, self._template)
        kept = NOT_KEPT if params is None else params
        return Weights(f"{name}-{end}", f"{label}, step {end}", end, kept)

    def way(
        self, weights: Weights, name: str = "", label: str = "", play: Any = None, **record: Any
    ) -> Way[Row]:
        """The play of these weights into the log of this name."""
        of_weights = {"checkpoint": weights.label, "weights": weights.digest}
        return Way(
            name or weights.name,
            label or weights.label,
            play or self.play,
            lambda: weights.params,
            self.record | of_weights | record,
        )

    def ways(self, checkpoint: str) -> Iterator[Weights]:
        """The weights that are scored: a checkpoint's, those of earlier stages, the untrained.

        Each are read when they are due, and may be dropped then.
        """
        step = (own := self.weights(checkpoint)).step
        yield own
        del own
        yield from (self.after(end) for end in self.stages if end < step)
        yield self.weights(FIRST)

    def scored(
        self, out: Path, ways: Iterable[Way[Row]], options: ScoreOptions
    ) -> tuple[list[tuple[Way[Row], Path]], list[str]]:
        """The log of each way, the run's own first; and why ways are not here."""
        kept = dict[str, Way[Row]]()

        def noted() -> Iterator[Way[Row]]:
            for way in ways:
                kept[way.name] = dataclasses.replace(way, params=lambda: None)  # not its weights
                yield way

        logs, notes = self.questions.played(out, noted(), {}, self.stop, restart=options.restart)
        return [(kept[name], log) for name, log in logs.items()], notes

    def predict(self, weights: Weights, log: Path, *, restart: bool = False) -> None:
        """Plays all that the file lacks."""
        self.questions.into(log, self.way(weights), {}, self.stop, restart=restart)

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.system.workdir, read_only=True)

    @cached_property
    def _template(self) -> Any:
        return placement.shapes_on(self.system.inputs.model.trained, self.system.param_shardings)

"""Config section for where metrics go besides `metrics.jsonl`."""

from __future__ import annotations

import dataclasses
import re

from qrag_jax.errors import InputError

TENSORBOARD, WANDB, MLFLOW, TRACKIO = "tensorboard", "wandb", "mlflow", "trackio"
KNOWN = (TENSORBOARD, WANDB, MLFLOW, TRACKIO)
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LONGEST = 100  # characters of a run's name


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Section `log`.

    Raises:
        InputError: a field cannot be used.
    """

    # Where metrics go besides metrics.jsonl, which is always written: tensorboard, wandb, mlflow,
    # trackio, with commas between them, or () for nowhere. All but the first need an extra of their
    # name (docs/trackers.md).
    to: tuple[str, ...] = (TENSORBOARD,)
    project: str = "qrag"  # project of trackers that the run belongs to; MLflow's experiment
    name: str = ""  # of the run in trackers; empty: that of the run's folder

    def __post_init__(self) -> None:
        given = (self.to,) if isinstance(self.to, str) else self.to
        # On a command line, --config.log.to=wandb,mlflow is one text.
        names = [name.strip() for each in given for name in str(each).split(",")]
        object.__setattr__(self, "to", tuple(filter(None, names)))
        if unknown := [name for name in self.to if name not in KNOWN]:
            raise InputError(
                f"config.log.to has {unknown[0]!r}; use some of {', '.join(KNOWN)}, or ()."
            )
        if len({*self.to}) < len(self.to):
            raise InputError(f"config.log.to is {', '.join(self.to)}; name each only once.")
        if not _PROJECT.fullmatch(self.project):
            raise InputError(
                f"config.log.project is {self.project!r}; use 1 to 100 letters, digits, dots, "
                "dashes and underscores, the first a letter or digit."
            )
        if len(self.name) > _LONGEST or not (self.name or "x").isprintable():
            raise InputError(
                f"config.log.name is {self.name!r}; use at most {_LONGEST} printable characters."
            )

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those of `to` that need a library of their own."""
        return tuple(name for name in self.to if name != TENSORBOARD)

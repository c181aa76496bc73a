"""Config sections of a training: its length, its batches, its saves and scores, its trackers."""

from __future__ import annotations

import dataclasses
import re

from qrag_jax.errors import InputError, check_least


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Section `train`."""

    steps: int = 10_000  # optimizer steps
    batch_size: int = 48  # questions per optimizer step
    accumulation: int = 4  # micro-batches per optimizer step
    log_every: int = 10  # steps that one line of metrics averages over
    eval_every: int = 250  # steps between evaluations
    # the first evaluation comes after so many minutes, unless eval_every steps are done before; 0:
    # by steps alone
    first_eval_minutes: float = 10.0
    checkpoint_every: int = 250  # steps between saves of the whole state
    # episodes of each evaluation that are kept, in episodes.jsonl and TensorBoard; 0: none
    log_episodes: int = 8
    # number of steps in a row with a non-finite loss or gradient that ends the run; 0: no limit
    max_skipped_steps: int = 10

    def __post_init__(self) -> None:
        names = ("steps", "batch_size", "accumulation", "log_every")
        least = dict.fromkeys((*names, "eval_every", "checkpoint_every"), 1)
        least |= dict.fromkeys(("max_skipped_steps", "log_episodes", "first_eval_minutes"), 0)
        check_least("train", self, **least)

    def host_batch(self, devices: int, hosts: int) -> int:
        """Number of questions per optimizer step on one host."""
        parts = devices * self.accumulation
        if self.batch_size % parts:
            raise InputError(
                f"config.train.batch_size is {self.batch_size}, which does not split into {parts} "
                f"equal parts (devices × config.train.accumulation); use a multiple of {parts}."
            )
        return self.batch_size // hosts


TENSORBOARD, WANDB, MLFLOW, TRACKIO = "tensorboard", "wandb", "mlflow", "trackio"
KNOWN = (TENSORBOARD, WANDB, MLFLOW, TRACKIO)
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LONGEST = 100  # characters of a run's name


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Section `log`."""

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

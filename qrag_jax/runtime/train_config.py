"""Config sections of a training: its length, its batches, its saves and scores, its trackers."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

from qrag_jax.errors import Count, InputError, Natural, Rule, Weight, some_of


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Section `train`."""

    steps: Count = 10_000  # optimizer steps
    batch_size: Count = 48  # questions per optimizer step
    accumulation: Count = 4  # micro-batches per optimizer step
    log_every: Count = 10  # steps that one line of metrics averages over
    eval_every: Count = 250  # steps between evaluations
    # the first evaluation comes after so many minutes, unless eval_every steps are done before; 0:
    # by steps alone
    first_eval_minutes: Weight = 10.0
    checkpoint_every: Count = 250  # steps between saves of the whole state
    # episodes of each evaluation that are kept, in episodes.jsonl and TensorBoard; 0: none
    log_episodes: Natural = 8
    # number of steps in a row with a non-finite loss or gradient that ends the run; 0: no limit
    max_skipped_steps: Natural = 10

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
_PROJECT = Rule(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch,
    "use 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
)
_RUN = Rule(
    lambda name: len(name) <= 100 and (name or "x").isprintable(),
    "use at most 100 printable characters",
)


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Section `log`."""

    # Where metrics go besides metrics.jsonl, which is always written: tensorboard, wandb, mlflow,
    # trackio, with commas between them, or () for nowhere. All but the first need an extra of their
    # name (docs/trackers.md).
    to: Annotated[tuple[str, ...], some_of(KNOWN, empty=True)] = (TENSORBOARD,)
    # project of trackers that the run belongs to; MLflow's experiment
    project: Annotated[str, _PROJECT] = "qrag"
    name: Annotated[str, _RUN] = ""  # of the run in trackers; empty: that of the run's folder

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those of `to` that need a library of their own."""
        return tuple(name for name in self.to if name != TENSORBOARD)

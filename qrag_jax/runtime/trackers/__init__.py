"""Trackers: programs and services that keep the metrics of many runs (W&B, MLflow, trackio).

Each has a module of its name here with a function `begin(start)`, which alone imports its library.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from qrag_jax.errors import InputError
from qrag_jax.runtime.trackers import wandb_key
from qrag_jax.runtime.train_config import WANDB, LogConfig

FOLDER = "trackers"  # in the run's folder: what was sent to each


class Tracker(Protocol):
    """One run in a tracker. Its methods may raise anything.

    Attributes:
        run: what names the run there, so that a later start goes on in it.
    """

    @property
    def run(self) -> str: ...

    def write(self, row: int, step: int, scalars: Mapping[str, float]) -> None:
        """Adds finite scalars.

        Args:
            row: grows with every call, over all starts of the run.
            step: number of optimizer steps done; it may be lower than that of an earlier call.
        """
        ...

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        """Adds a text in Markdown; `row` and `step` are those of `write`."""
        ...

    def close(self) -> None:
        """Waits until everything has arrived, and ends the run there."""
        ...


@dataclasses.dataclass(frozen=True)
class Start:
    """What a tracker begins with.

    Attributes:
        workdir: the run's folder.
        project: the project that the run belongs to.
        name: what people call the run.
        config: all fields of the experiment, in nested sections.
        kept: `Tracker.run` of an earlier start; "": there was none.
    """

    workdir: Path
    project: str
    name: str
    config: Mapping[str, Any]
    kept: str = ""


def begin(tracker: str, start: Start) -> Tracker:
    """Begins the run in a tracker, or goes on in it; may raise anything."""
    return importlib.import_module(f"{__name__}.{tracker}").begin(start)


def check_usable(log: LogConfig) -> None:
    """Refuses trackers that cannot be used on this machine, before anything is computed.

    What depends on a network is not asked: a server that is away must not end a training.
    """
    for name in log.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb's own files
            raise InputError(
                f"config.log.to has {name}, which is not installed: run pip install "
                f"'qrag_jax[{name}]', or leave it out."
            )
    if WANDB in log.trackers and not wandb_key.is_given():
        raise InputError(
            "config.log.to has wandb, and there is no key for it: set the environment variable "
            "WANDB_API_KEY, or WANDB_MODE=offline to keep the run on this machine."
        )

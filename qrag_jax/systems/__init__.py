"""The systems: one file each, its parts chosen by a config and put together.

A system's module has `check(config)`, which refuses what makes no sense whatever the data are, and
`open_system(config, run, dry=…)`, a context manager that gives a `System`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.rollouts.experience import Experience
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.step_log import Told
from qrag_jax.runtime.train_config import TrainConfig

# config.system → its module.
SYSTEMS = {"q_rag": "qrag_jax.systems.q_rag"}


class System(Protocol):
    """What the training loop asks of a system.

    Attributes:
        train: section `train` of its config. profile: steps to trace.
        data: content of the training data by source. provenance: what rewards depend on besides.
        line: what is trained on what, for the screen. told: what the log of steps tells.
    """

    train: TrainConfig
    profile: int
    data: Mapping[str, str]
    provenance: Mapping[str, Any]
    line: str
    told: Told

    def first_state(self) -> Any:
        """The first state of training, built in place; it has `params`."""
        ...

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """What the run learns from, at the run's progress.

        Raises:
            Stopped: the run is to stop while this waits for a server.
        """
        ...

    def update(self, state: Any, episodes: Any) -> tuple[Any, dict[str, Any]]:
        """One optimizer step: one compiled program, which the device may still be computing as
        this returns. The metrics have `skipped`, 1 where nothing was learned."""
        ...

    def programs(self) -> list[Program]:
        """All that it computes with, for a dry run."""
        ...

    def evaluate(self, state: Any, step: int, stop: StopSignal) -> Evaluation:
        """Scores the parameters.

        Raises:
            Stopped: the run is to stop first.
            FeedbackLost: no more rewards can be had.
        """
        ...


def check(config: ConfigDict) -> None:
    """Refuses a config that makes no sense whatever the data are.

    Raises:
        InputError: the system is unknown, or a value.
    """
    _module(config).check(config)


def open_system(
    config: ConfigDict, run: Run, *, dry: bool = False
) -> AbstractContextManager[System]:
    """The system of a config, everything read and checked that the run's folder and data say.

    Args:
        dry: nothing will be trained, so no server is started.

    Raises:
        InputError: the run has another config, or its data or encoder cannot be used.
    """
    return _module(config).open_system(config, run, dry=dry)


def _module(config: ConfigDict) -> Any:
    name = config.get("system", "")
    if name not in SYSTEMS:
        raise InputError(f"config.system is {name!r}; use one of {', '.join(SYSTEMS)}.")
    return importlib.import_module(SYSTEMS[name])

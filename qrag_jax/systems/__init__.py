"""The systems that can be trained: each is a folder, whose module `system` assembles the parts.

The module names its class `SYSTEM`, which is a `System`.

In all of these modules, what takes a `StopSignal` raises `Stopped` when a signal came, what plays
raises `FeedbackLost` when too many episodes fail, and what writes raises `OSError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from qrag_jax.errors import InputError
from qrag_jax.runtime import own_code
from qrag_jax.runtime.config_fields import TrainConfig, read_fields, save_config

if TYPE_CHECKING:  # not at run time: a deployed retriever (`systems.retriever`) needs no jax
    from ml_collections import ConfigDict

    from qrag_jax.evaluators.evaluation import Evaluation
    from qrag_jax.rollouts.experience import Experience
    from qrag_jax.runtime.aot import Program
    from qrag_jax.runtime.interrupt import StopSignal
    from qrag_jax.runtime.run import Run

# config.system → its module.
SYSTEMS = {
    "q_rag": "qrag_jax.systems.q_rag.system",
    "harr": "qrag_jax.systems.harr.system",
    "rlvr": "qrag_jax.systems.rlvr.system",
    "leret": "qrag_jax.systems.leret.system",
    "deepretrieval": "qrag_jax.systems.deepretrieval.system",
}


class System(Protocol):
    """What the training loop asks of a system; a class of your own inherits the defaults."""

    train: TrainConfig  # section `train` of the config
    profile: int  # number of steps to trace
    data: Mapping[str, str]  # content key of the training data, by source
    provenance: Mapping[str, Any]  # what the rewards depend on besides the data
    line: str  # one line for the screen: what is trained, and on what
    shown: Mapping[str, str]  # metrics shown next to the progress bar: name → format

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Checks an experiment."""

    @classmethod
    def before_devices(
        cls, config: ConfigDict, *, dry: bool = False, described: bool = False
    ) -> None:
        """Sets what JAX reads when it looks for devices.

        Args:
            dry: nothing will be trained, so no server needs memory.
            described: programs are compiled for devices that are not here.
        """

    @classmethod
    @contextlib.contextmanager
    def open_system(
        cls, config: ConfigDict, run: Run, *, dry: bool = False, devices: Any = None
    ) -> Iterator[Any]:
        """Opens the system of a config: reads and checks the run's folder, the data and the model.

        Args:
            dry: a dry run, for which no server is started.
            devices: None: all of this process. They may be described ones (`runtime.aot`), on which
                nothing can be placed.
        """
        if run.has_begun:
            run.check_config(type(config)(read_fields(run.config_path)), config, (), ())
        run.begin(lambda: save_config(config, run.config_path))
        yield cast(Any, cls)(config)

    # The first state of training, built in place; it has a field `params`.
    def first_state(self) -> Any: ...
    # The ids of questions from their numbers in the experience of a step, which counts from 1.
    def names(self, numbers: Sequence[int], step: int) -> list[str]: ...
    # What the run learns from, continued where the run's progress ends.
    def experience(self, run: Run, stop: StopSignal) -> Experience: ...
    # Does one optimizer step, with one compiled program, which may still run at the end. The metric
    # `skipped` is 1 if nothing was learned.
    def update(self, state: Any, episodes: Any) -> tuple[Any, dict[str, Any]]: ...
    # All programs that the system runs, for a dry run.
    def programs(self) -> list[Program]: ...
    def evaluate(self, state: Any, step: int, stop: StopSignal) -> Evaluation: ...

    @classmethod
    def export_run(cls, workdir: Path, config: ConfigDict, checkpoint: str, out: Path) -> None:
        """`qrag export`: a checkpoint ("": the best) by the method `export(state, out)`, if any."""
        if (export := getattr(cls, "export", None)) is None:
            raise InputError(f"the system {config.system!r} has no export(state, out).")
        with saved_system(workdir, config, checkpoint or "best") as (system, state, _):
            out.mkdir(parents=True, exist_ok=True)
            export(system, state, out)


def check(config: ConfigDict) -> type[System]:
    """Checks an experiment; returns its system. That may be a file, FILE.py, which is run: a user
    names it here, while the config in a run's folder names no code (`register`)."""
    if (name := config.get("system", "")).endswith(own_code.SUFFIX):
        register(name, name)
    (system := kind(config)).check(config)
    return system


def register(name: str, where: str) -> None:
    """Adds a system from outside the package, unless this program has done so itself.

    Its code (FILE.py or a module) runs, so `where` comes from the command line and never from a
    run's folder.
    """
    if where.endswith(own_code.SUFFIX):
        SYSTEMS[name] = own_code.run_file(where, "--system").__name__
    elif where:
        SYSTEMS[name] = where
    elif name not in SYSTEMS:
        raise InputError(f"{name!r} is no system of this package; give its code, --system=FILE.py.")


@contextlib.contextmanager
def saved_system(
    workdir: Path, config: ConfigDict, checkpoint: str
) -> Iterator[tuple[System, Any, int]]:
    """The system of a trained run, its first state with a checkpoint's weights, and their step."""
    from qrag_jax.runtime.checkpoints import Checkpoints
    from qrag_jax.runtime.run import Run

    with (
        Run.open(workdir, time.monotonic()) as run,
        kind(config).open_system(config, run) as system,
    ):
        state = system.first_state()
        saved = Checkpoints(workdir, read_only=True)
        params, step = saved.restore_params(checkpoint, state.params)
        replace = getattr(state, "_replace", None) or partial(dataclasses.replace, state)
        yield system, replace(params=params), step


def source(name: str) -> str:
    """The file of a system from outside the package; "" for one of the package."""
    module = SYSTEMS[name]
    inside = module.startswith(f"{__name__}.")
    return "" if inside else str(getattr(importlib.import_module(module), "__file__", module))


def kind(config: ConfigDict) -> Any:
    """The class of the system of a config."""
    name = config.get("system", "")
    if name not in SYSTEMS:
        raise InputError(f"config.system is {name!r}; use one of {', '.join(SYSTEMS)}.")
    try:
        module = importlib.import_module(SYSTEMS[name])
    except ModuleNotFoundError as error:
        if error.name != SYSTEMS[name]:
            raise
        module = None
    if (system := getattr(module, "SYSTEM", None)) is None:
        raise InputError(f"the system {name!r} is module {SYSTEMS[name]}, with no class SYSTEM.")
    return system

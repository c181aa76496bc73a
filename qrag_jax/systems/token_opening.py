"""Opens systems whose policy is a language model: data, mesh, and the server that samples."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.feedback.service import leave_room
from qrag_jax.models.files.model_folder import read_config
from qrag_jax.models.first_language_model import named_folder
from qrag_jax.runtime import determinism, hosts
from qrag_jax.runtime.mesh import host_mesh, make_mesh
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.saved_config import save_config
from qrag_jax.systems.served_policy import ServedSettings, open_served
from qrag_jax.systems.token_system import TokenSystem

System = TypeVar("System", bound=TokenSystem[Any, Any])


@dataclasses.dataclass(frozen=True)
class Opening(Generic[System]):
    """How the runs of one system are opened; its methods are the functions of the system's module.

    Attributes:
        system: its class.
        config: reads settings, and refuses those that are wrong for any data.
        saved: reads the config of a run.
        free: beginnings of names of fields that may change when a run goes on.
        paths: names of fields of data whose digests a checkpoint keeps.
        load: (settings, the run's folder, a mesh of this host) → data and model; refuses those that
            cannot be used.
    """

    system: type[System]
    config: Callable[[ConfigDict], Any]
    saved: Callable[[Path], ConfigDict]
    free: tuple[str, ...]
    paths: tuple[str, ...]
    load: Callable[[Any, Path, Mesh], Any]

    def check(self, given: ConfigDict) -> None:
        """Refuses values that are wrong for any data."""
        self.config(given)

    def before_devices(
        self, given: ConfigDict, *, dry: bool = False, described: bool = False
    ) -> str:
        """Sets how much of a GPU's memory JAX takes, and that its programs are deterministic."""
        config = self.config(given)
        if config.llm is not None and not dry:
            leave_room(config.llm)
        return determinism.ask(config.runtime.deterministic, described=described)

    @contextlib.contextmanager
    def open_system(
        self,
        given: ConfigDict,
        run: Run,
        *,
        dry: bool = False,
        devices: Sequence[jax.Device] | None = None,
    ) -> Iterator[System]:
        """Opens the system, and the server that samples if the config has one; see `systems`."""
        if run.has_begun:
            run.check_config(self.saved(run.config_path), given, self.free, self.paths)
        config = self.config(given)
        mesh = make_mesh(config.runtime.mesh, devices)
        own = mesh if devices is not None else host_mesh(config.runtime.mesh)
        hosts.check_play(config.runtime.mesh, own, self.system.staleness(config))
        if config.model.path:
            read_config(named_folder(config.model.path))  # refused before the data are read
        inputs = self.load(config, run.workdir, own)
        run.begin(lambda: save_config(given, run.config_path))

        # The checkpoints are asked for when they are needed, and not made by a start that fails.
        def keep(step: int, params: Any) -> None:
            run.checkpoints.save_stage(step, params)

        with contextlib.ExitStack() as stack:
            served = None
            if config.llm is not None and not dry:
                staleness = self.system.staleness(config)
                sizes = config.model.lora.sizes
                settings = ServedSettings(config.llm, config.sampling, sizes, staleness)
                served = stack.enter_context(
                    open_served(settings, inputs.model, inputs.speech, run.workdir)
                )
            yield self.system(
                config,
                mesh,
                inputs,
                run.workdir,
                placed=devices is None,
                keep=keep,
                served=served,
                own=own,
            )

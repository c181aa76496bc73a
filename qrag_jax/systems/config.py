"""The layout of every system's config: one dataclass, whose fields are its fields and sections.

Every section is always there. What the values of a config do not read is ignored, and shown as "not
read" by `train --help`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.data.config import sources_section
from qrag_jax.errors import InputError, Natural
from qrag_jax.feedback.llm import leave_room
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.runtime import saved_config
from qrag_jax.runtime.config_fields import described, fill, refusing_types, section
from qrag_jax.runtime.mesh import RuntimeConfig, make_mesh
from qrag_jax.runtime.platform import ask_determinism, enable_persistent_cache
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import LogConfig, TrainConfig, read_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """The fields and sections that all systems have."""

    NAME: ClassVar[str]
    # Fields that do not change what a run computes: a resumed run may have other values.
    FREE_FIELDS: ClassVar[tuple[str, ...]] = saved_config.FREE_FIELDS
    PATHS: ClassVar[tuple[str, ...]] = ()  # of data whose digests are kept
    seed: int = 42  # of the shuffle, the policy's draws and random weights
    # steps traced into workdir/profile after the first two of a start, 0: none
    profile: Natural = 0
    optimizer: OptimizerConfig
    train: TrainConfig
    runtime: RuntimeConfig
    log: LogConfig
    llm: Any

    @classmethod
    def default(cls, *sources: str) -> ConfigDict:
        """All fields with their defaults, on these data sources."""
        config = section(cls, system=cls.NAME)
        if "data" in config:
            config.data.sources = sources_section(sources)
        return config

    @classmethod
    @refusing_types("the config")
    def of(cls, config: Mapping[str, Any] | ConfigDict, **how: Any) -> Self:
        """Reads and checks the settings of a config; `how` is of `settled`."""
        given = {name: value for name, value in config.items() if name != "system"}
        return fill(cls, given).settled(**how)

    def settled(self) -> Self:
        """The settings with what follows from several of them; refuses those that do not fit."""
        return self

    @classmethod
    def before_devices(
        cls, given: ConfigDict, *, dry: bool = False, described: bool = False
    ) -> str:
        """See `systems.before_devices`: how much of a GPU's memory JAX takes, and determinism."""
        config = cls.of(given)
        if config.llm is not None and not dry:
            leave_room(config.llm)
        return ask_determinism(config.runtime.deterministic, described=described)

    def mesh(self, mesh_of: Callable[[tuple[int, int, int]], Mesh] = make_mesh) -> Mesh:
        """The mesh of a command that plays a trained run; compiled programs are kept."""
        if told := ask_determinism(self.runtime.deterministic):
            log(told)
        enable_persistent_cache()
        return mesh_of(self.runtime.mesh)

    @classmethod
    def help_lines(cls) -> list[tuple[str, Any, str]]:
        """Name, default and comment of every field that a config can have."""
        return sorted(described(cls, ""), key=lambda line: line[0].split("."))

    @classmethod
    def unread(cls, fields: Mapping[str, Any]) -> list[str]:
        """Sections and fields that a run with these values, by names with dots, does not read."""
        return []

    @classmethod
    def resume(cls, given: ConfigDict, run: Run) -> None:
        """Refuses to go on with a run under another config than its own."""
        if run.has_begun:
            saved = load_config(run.config_path)
            run.check_config(saved, given, cls.FREE_FIELDS, cls.PATHS)


def load_config(path: Path) -> ConfigDict:
    """Reads the config of a run."""
    fields = read_fields(path)
    if not isinstance(fields, dict) or "system" not in fields:
        raise InputError(
            f"{path} names no system, so it is not the config of a run; give the folder of a "
            "training."
        )
    with refusing_types(path):
        return ConfigDict(fields)

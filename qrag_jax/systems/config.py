"""The layout of a system's config: its fields and sections, and how they are read and shown."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ml_collections import ConfigDict

from qrag_jax.data.config import DataConfig, data_section, described_sources, fill_data
from qrag_jax.errors import InputError, check_known, check_least
from qrag_jax.evaluators.eval_config import CHOOSING, HALVES
from qrag_jax.llm.server.server_config import ServerConfig
from qrag_jax.runtime.config_fields import (
    check_type,
    described,
    fill,
    refusing_types,
    section,
)
from qrag_jax.runtime.saved_config import read_fields

SEED = (42, "of the shuffle, the policy's draws and random weights")
PROFILE = (0, "steps traced into workdir/profile after the first two of a start, 0: none")
COMMON: dict[str, tuple[Any, str]] = {"seed": SEED, "profile": PROFILE}


def sections_of(config: type) -> dict[str, type]:
    """The sections of a dataclass of settings: its fields that are dataclasses, but for `data`."""
    kinds = typing.get_type_hints(config).items()
    return {
        name: kind
        for name, kind in kinds
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and name != "data"
    }


def check_stages(stages: tuple[str, ...], known: Sequence[str]) -> None:
    """Refuses stages that are not some of these, in their order."""
    if not stages or stages != tuple(each for each in known if each in stages):
        raise InputError(
            f"config.stages is {', '.join(map(str, stages)) or 'empty'}; use some of "
            f"{', '.join(known)}, in this order."
        )


@dataclasses.dataclass(frozen=True)
class HalvedEvalConfig:
    """Section `eval` of fixed questions, half of which choose the best checkpoint."""

    BEST_BY: ClassVar[tuple[str, ...]] = ()
    samples: int = 300  # fixed questions scored during training, 0: all
    best_by: str = ""
    seed: int = 42  # draws the scored questions
    # Which are scored: "choosing", the half that chooses the best checkpoint, or "all" questions;
    # evaluate scores the other half, "reported", unless this is "all"
    part: str = CHOOSING

    def __post_init__(self) -> None:
        check_least("eval", self, samples=0)
        check_known("eval", self, "best_by", self.BEST_BY)
        check_known("eval", self, "part", HALVES)


@dataclasses.dataclass(frozen=True)
class ConfigLayout:
    """The parts of a system's config. Every section is always there, whatever the values."""

    system: str  # its name
    # Those outside sections, with their defaults and comments
    fields: Mapping[str, tuple[Any, str]]
    sections: Mapping[str, type]  # the dataclass of each, but for `data` and `llm`
    llm: type  # the dataclass of section `llm`, which only some values read
    later: tuple[str, ...] = ()  # sections that `parts` leaves to the system
    has_data: bool = False  # whether there is a section `data`
    # The field that bounds the memory of a step, where micro-batches do not; "": these do
    blocks: str = ""

    def default(self, *sources: str) -> ConfigDict:
        """All fields with their defaults, on these data sources."""
        config = ConfigDict({"system": self.system})
        for name, (value, _) in self.fields.items():
            config[name] = value
        for name, kind in self.sections.items():
            config[name] = section(kind)
        if self.has_data:
            config.data = data_section(sources)
        config.llm = section(self.llm)
        config.llm.server = section(ServerConfig)
        if self.blocks:
            config.train.accumulation = 1
        return config

    def load(self, path: Path) -> ConfigDict:
        """Reads the config of a run."""
        saved = read_fields(path)
        with refusing_types(path):
            return ConfigDict(saved)

    def parts(self, config: ConfigDict) -> dict[str, Any]:
        """The fields, and the settings of sections, but for those that come later and `llm`."""
        known = {*self.fields, *self.sections, "system", "llm"}
        known |= {"data"} if self.has_data else set()
        if unknown := sorted(set(config) - known):
            raise InputError(f"config.{unknown[0]!s:.60} is unknown; there are {', '.join(known)}.")
        for name, (default, _) in self.fields.items():
            check_type(type(default), config[name], name)
        if config.profile < 0:
            raise InputError(f"config.profile is {config.profile}; it must be at least 0.")
        found: dict[str, Any] = {
            name: tuple(config[name]) if isinstance(default, tuple) else config[name]
            for name, (default, _) in self.fields.items()
        }
        found |= {
            name: fill(kind, config[name], name)
            for name, kind in self.sections.items()
            if name not in self.later
        }
        if self.has_data:
            found["data"] = fill_data(config.data)
        if self.blocks and found["train"].accumulation != 1:
            raise InputError(
                f"config.train.accumulation is {found['train'].accumulation}; a step is computed "
                f"in blocks of config.{self.blocks}, which bound the memory: set it to 1."
            )
        return found

    def llm_settings(self, config: ConfigDict) -> Any:
        """The settings of section `llm`; with an address, no server is started."""
        fields = dict(config.llm.items())
        if fields["url"]:
            fields.pop("server")
        return fill(self.llm, fields, "llm")

    def help_lines(self) -> list[tuple[str, Any, str]]:
        """Name, default and comment of every field that a config can have."""
        lines: list[tuple[str, Any, str]] = [(name, *about) for name, about in self.fields.items()]
        for name, kind in self.sections.items():
            lines += described(kind, name)
        if self.has_data:
            lines += described(DataConfig, "data") + described_sources()
        lines += [line for line in described(self.llm, "llm") if "llm.server." not in line[0]]
        lines += described(ServerConfig, "llm.server")
        return sorted(lines, key=lambda line: line[0].split("."))

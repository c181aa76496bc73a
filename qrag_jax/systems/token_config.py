"""What the configs of all systems have whose policy is a language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ml_collections import ConfigDict

from qrag_jax.errors import InputError, check_least
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.learners.token_config import SFTConfig
from qrag_jax.llm.served_config import Needs, ServedConfig
from qrag_jax.llm.server.server_config import ServerConfig
from qrag_jax.models.first_language_model import LanguageModelConfig
from qrag_jax.rollouts.token_sampler import SERVER, SamplingConfig
from qrag_jax.runtime.config_fields import described, fill, refusing_types, section
from qrag_jax.runtime.saved_config import read_fields
from qrag_jax.runtime.sharding import RuntimeConfig
from qrag_jax.runtime.train_config import TrainConfig

BRIDGE = "bridge"  # in place of data: questions that are made here
SEED = (42, "of the shuffle, the policy's draws and random weights")
PROFILE = (0, "steps traced into workdir/profile after the first two of a start, 0: none")


class TokenConfig(Protocol):
    """What is read here of a config.

    Attributes:
        llm: of the server that samples; None: the device does.
    """

    @property
    def seed(self) -> int: ...
    @property
    def profile(self) -> int: ...
    @property
    def llm(self) -> ServedConfig | None: ...
    @property
    def runtime(self) -> RuntimeConfig: ...
    @property
    def model(self) -> LanguageModelConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def train(self) -> TrainConfig: ...


@dataclasses.dataclass(frozen=True)
class ConfigLayout:
    """The parts of a system's config.

    Attributes:
        system: its name.
        fields: those outside sections, with their defaults and comments.
        sections: the dataclass of each.
    """

    system: str
    fields: Mapping[str, tuple[Any, str]]
    sections: Mapping[str, type]

    def default(self) -> ConfigDict:
        """All fields with their defaults."""
        config = ConfigDict({"system": self.system})
        for name, (value, _) in self.fields.items():
            config[name] = value
        for name, kind in self.sections.items():
            config[name] = section(kind)
        config.llm = section(ServedConfig)
        config.llm.server = section(ServerConfig, max_model_len=0)
        config.train.accumulation = 1
        return config

    def load(self, path: Path) -> ConfigDict:
        """Reads the config of a run."""
        saved = read_fields(path)
        with refusing_types(path):
            return ConfigDict(saved)

    def parts(self, config: ConfigDict) -> dict[str, Any]:
        """The settings of each section."""
        known = {*self.fields, *self.sections, "system", "llm"}
        if unknown := sorted(set(config) - known):
            raise InputError(f"config.{unknown[0]!s:.60} is unknown; there are {', '.join(known)}.")
        found: dict[str, Any] = {
            name: fill(kind, config[name], name) for name, kind in self.sections.items()
        }
        if found["train"].accumulation != 1:
            raise InputError(
                f"config.train.accumulation is {found['train'].accumulation}; rows are computed in "
                "blocks of config.model.block_tokens, which bound the memory: set it to 1."
            )
        return found

    def unread(self, fields: Mapping[str, Any]) -> list[str]:
        """Sections that a run with these values does not read; `fields` by names with dots."""
        return [] if fields["sampling.engine"] == SERVER else ["llm"]

    def help_lines(self) -> list[tuple[str, Any, str]]:
        """Name, default and comment of every field that a config can have."""
        lines: list[tuple[str, Any, str]] = [(name, *about) for name, about in self.fields.items()]
        for name, kind in self.sections.items():
            lines += described(kind, name)
        lines += described(ServedConfig, "llm") + described(ServerConfig, "llm.server")
        return sorted(lines, key=lambda line: line[0].split("."))


def served_config(config: ConfigDict, parts: Mapping[str, Any], versions: int) -> ServedConfig:
    """The section `llm`, which is read only if a server samples.

    Args:
        versions: of the weights that stay loaded.
    """
    needs = Needs(rank=parts["model"].lora.rank, versions=versions, room=parts["sampling"].room)
    return ServedConfig.of(config.get("llm", ConfigDict()).to_dict(), needs)


def check_named(questions: Any) -> None:
    """Refuses a section `questions` whose `train` or `dev` is empty."""
    for name in ("train", "dev"):
        if not getattr(questions, name):
            raise InputError(
                f"config.questions.{name} is empty; use {BRIDGE!r}, or name parts of data as "
                "path,config,split."
            )


def check_stage(name: str, stage: Any) -> None:
    """Refuses a stage without steps, rows or learning."""
    check_least(name, stage, steps=1, batch_size=1)
    if not stage.learning_rate > 0:
        raise InputError(
            f"config.{name}.learning_rate is {stage.learning_rate}; it must be above 0."
        )


@dataclasses.dataclass(frozen=True)
class StageSFTConfig(SFTConfig):
    """Section `sft`: the policy imitates."""

    SECTION: ClassVar[str] = "sft"
    steps: int = 100  # optimizer steps of the stage
    batch_size: int = 16  # rows of a step
    learning_rate: float = 1e-3  # peak; its warm-up and decay are over the stage

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stage(self.SECTION, self)


@dataclasses.dataclass(frozen=True)
class ScriptConfig(StageSFTConfig):
    """Section `script`: the policy imitates scripted demonstrations before it tries anything."""

    SECTION: ClassVar[str] = "script"
    # Imitate prompts and what is read, too: a model that knows nothing learns to copy from them
    observed: bool = False

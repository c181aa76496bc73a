"""What the configs of all systems have whose policy is a language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ml_collections import ConfigDict

from qrag_jax.errors import InputError, check_above, check_least
from qrag_jax.learners.config import SFTConfig
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.llm.config import Needs, ServedConfig
from qrag_jax.models.first_language_model import LanguageModelConfig
from qrag_jax.rollouts.token_sampler import SERVER, SamplingConfig
from qrag_jax.runtime.mesh import RuntimeConfig
from qrag_jax.runtime.train_config import LogConfig, TrainConfig
from qrag_jax.systems.config import ConfigLayout

BRIDGE = "bridge"  # in place of data: questions that are made here


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """The settings that all these systems have, one dataclass for each section."""

    seed: int
    profile: int
    stages: tuple[str, ...]
    model: LanguageModelConfig
    sampling: SamplingConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    runtime: RuntimeConfig
    log: LogConfig
    # Of the server that samples; None: the device does, or nothing is sampled
    llm: ServedConfig | None = None


def layout(
    system: str, fields: Mapping[str, tuple[Any, str]], sections: Mapping[str, type]
) -> ConfigLayout:
    """The layout of a system's config whose policy is a language model."""
    return ConfigLayout(system, fields, sections, ServedConfig, blocks="model.block_tokens")


def default_config(of: ConfigLayout) -> ConfigDict:
    """All fields with their defaults; a server that samples takes the room of an episode."""
    config = of.default()
    config.llm.server.max_model_len = 0
    return config


def unread(fields: Mapping[str, Any]) -> list[str]:
    """Sections that a run with these values does not read; `fields` by names with dots."""
    return [] if fields["sampling.engine"] == SERVER else ["llm"]


def served_config(config: ConfigDict, parts: Mapping[str, Any], versions: int) -> ServedConfig:
    """The section `llm`, which is read only if a server samples.

    Args:
        versions: of the weights that stay loaded.
    """
    needs = Needs(rank=parts["model"].lora.rank, versions=versions, room=parts["sampling"].room)
    return ServedConfig.of(config.llm.to_dict(), needs)


def settle_stages(
    config: ConfigDict,
    parts: dict[str, Any],
    first: str,
    then: str,
    *,
    per_batch: int,
    stale: int,
) -> int:
    """Settles the steps of imitation and of a stage of rewards; returns those of imitation.

    Args:
        first, then: the sections of both stages; `then` has config.train.steps.
        per_batch: optimizer steps of a batch.
        stale: K, updates between playing a batch and learning from it.
    """
    stages, train = parts["stages"], parts["train"]
    if then in stages and not parts["sampling"].temperature:
        raise InputError(
            "config.sampling.temperature is 0, so nothing new would be tried; use a number above "
            "0, such as 1."
        )
    imitated = parts[first].steps if first in stages else 0
    rewarded = train.steps if then in stages else 0
    parts["train"] = dataclasses.replace(train, steps=imitated + rewarded)
    steps = max(rewarded, 1) * per_batch
    parts["optimizer"] = dataclasses.replace(parts["optimizer"], total_steps=steps)
    if then in stages and parts["sampling"].engine == SERVER:
        parts["llm"] = served_config(config, parts, stale + 2)
    return imitated


@dataclasses.dataclass(frozen=True)
class BridgeQuestionsConfig:
    """Section `questions`: what is asked."""

    # Training questions: "bridge", made here; or parts of data, path,config,split;path,config,split
    train: str = BRIDGE
    dev: str = BRIDGE  # questions to evaluate on, likewise
    bridge_train: int = 4000  # number of training questions that are made
    bridge_dev: int = 300  # number of questions to evaluate on that are made
    bridge_seed: int = 0  # of these

    def __post_init__(self) -> None:
        check_least("questions", self, bridge_train=1, bridge_dev=1, bridge_seed=0)
        for name in ("train", "dev"):
            if not getattr(self, name):
                raise InputError(
                    f"config.questions.{name} is empty; use {BRIDGE!r}, or name parts of data as "
                    "path,config,split."
                )


def check_stage(name: str, stage: Any) -> None:
    """Refuses a stage without steps, rows or learning."""
    check_least(name, stage, steps=1, batch_size=1)
    check_above(name, stage, "learning_rate")


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

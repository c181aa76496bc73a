"""What the configs of all systems have whose policy is a language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from ml_collections import ConfigDict

from qrag_jax.errors import Count, Filled, Natural, Positive, Share, one_of
from qrag_jax.learners.config import SFTConfig
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.llm.config import ServedConfig
from qrag_jax.models.first_language_model import LanguageModelConfig
from qrag_jax.rollouts.trajectories import SCORED, SERVER, TREATMENTS, SamplingConfig
from qrag_jax.runtime.config_fields import internal
from qrag_jax.systems.config import SystemConfig, refuse

BRIDGE = "bridge"  # in place of data: questions that are made here
_WARM_UP = 25  # a stage without rewards warms up for one part of so many, at most


class StagePlan(NamedTuple):
    kind: str  # its section of the config
    first: int  # the step with which it begins, from 0
    steps: int
    iteration: int = 0  # of LeReT, from 1

    @property
    def end(self) -> int:
        return self.first + self.steps

    @property
    def label(self) -> str:
        """What the weights at its end are called in tables."""
        return f"after {self.kind}{f' of iteration {self.iteration}' if self.iteration else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenConfig(SystemConfig):
    """The settings that all these systems have, one dataclass for each section."""

    # Section of how episodes are played: `attempts`, since one that fails is played again, so often
    # in all; and `max_failed_share` of a list of episodes, above which the play pauses
    PLAYED: ClassVar[str]
    COMMANDS: ClassVar[tuple[str, ...]] = ("predict", "export")
    IMITATION: ClassVar[str]  # the stage of scripted demonstrations, and its section
    TURNS: ClassVar[bool] = False  # an episode has several turns, each behind all before it
    stages: tuple[str, ...]
    model: LanguageModelConfig
    sampling: SamplingConfig
    # Of the server that samples; None: the device does, or nothing is sampled
    llm: ServedConfig | None = None
    eval: Any
    plan: tuple[StagePlan, ...] = internal(())

    @property
    def thinking(self) -> bool | None:
        """Whether the chat template makes the model think; None: as it does by itself."""
        return {"": None, "on": True, "off": False}[self.model.thinking]

    @property
    def played(self) -> Any:
        return getattr(self, self.PLAYED)

    @property
    def staleness(self) -> int:
        """K: updates between playing a batch and learning from it."""
        return getattr(self.played, "staleness", 0)

    @property
    def rule(self) -> Any:
        """The constants of the algorithm that learns by rewards; None: there is none."""
        return None

    @property
    def has_rewards(self) -> bool:
        """Whether a stage learns by rewards."""
        return self.rule is not None and {*self.stages} != {self.IMITATION}

    def algorithm_of(self, kind: str) -> Any:
        """The constants of the algorithm of a stage."""
        return getattr(self, kind, self.rule)

    def optimizer_of(self, kind: str) -> OptimizerConfig:
        """How a stage learns; one without rewards has a peak, a warm-up and a decay of its own."""
        if (stage := self.algorithm_of(kind)) is self.rule:
            return self.optimizer
        steps = stage.steps * stage.updates_per_batch
        fields: dict[str, Any] = {"learning_rate": stage.learning_rate, "total_steps": steps}
        if self.rule is None:  # the section `optimizer` is of these stages
            fields["warmup_steps"] = min(self.optimizer.warmup_steps, steps // _WARM_UP)
        else:
            fields |= {"schedule": "cosine", "final_ratio": 0.1, "warmup_steps": steps // _WARM_UP}
            fields["clip_norm"] = 1.0
        return dataclasses.replace(self.optimizer, **fields)

    @property
    def groups(self) -> int:
        """Questions of a batch that is learned from by rewards."""
        return self.train.batch_size

    @classmethod
    def default(cls, *sources: str) -> ConfigDict:
        """See `SystemConfig`; a server that samples takes the room of an episode."""
        config = super().default(*sources)
        config.llm.server.max_model_len, config.train.accumulation = 0, 1
        config.optimizer.update(weight_decay=0.0, beta1=0.9, eps=1e-8)
        return config

    @classmethod
    def unread(cls, fields: Mapping[str, Any]) -> list[str]:
        # A step is computed in blocks of model.block_tokens.
        llm = [] if fields["sampling.engine"] == SERVER else ["llm"]
        return ["train.accumulation", *llm, *(() if cls.TURNS else ("sampling.reuse",))]

    def with_stages(self, iterations: int = 0) -> Self:
        """Settles the steps of all stages, and what follows from them.

        Stages that do not imitate are done in each of so many iterations; 0: there are none.
        """
        nothing = self.has_rewards and not self.sampling.temperature
        refuse(self, (nothing, "sampling.temperature", "so nothing new would be tried; raise it"))
        order = [(kind, 0) for kind in self.stages if kind == self.IMITATION or not iterations]
        tried = [kind for kind in self.stages if kind != self.IMITATION]
        order += [(kind, number) for number in range(1, iterations + 1) for kind in tried]
        plan, optimizer, llm = list[StagePlan](), self.optimizer, None
        for kind, iteration in order:
            stage = self.algorithm_of(kind)
            steps = self.train.steps if stage is self.rule else stage.steps
            plan.append(StagePlan(kind, plan[-1].end if plan else 0, steps, iteration))
        if self.has_rewards:
            total = plan[-1].steps * self.rule.updates_per_batch
            optimizer = dataclasses.replace(optimizer, total_steps=total)
        if tried and self.sampling.engine == SERVER:  # which is read only then
            assert self.llm is not None
            # So many versions of the weights stay loaded.
            versions = self.staleness + 2
            llm = self.llm.fitted(self.model.lora.rank, versions, self.sampling.room)
        train = dataclasses.replace(self.train, steps=plan[-1].end)
        return dataclasses.replace(
            self, plan=tuple(plan), train=train, optimizer=optimizer, llm=llm
        )


@dataclasses.dataclass(frozen=True)
class PlayedConfig:
    attempts: Count = 2  # an episode that fails is played again, so often in all
    max_failed_share: Share = 0.5  # of a batch's episodes; above it the run pauses, and plays again
    # An episode whose last turn was cut off: masked (it trains nothing) or scored as it is
    truncated: Annotated[str, one_of(TREATMENTS)] = SCORED
    # K: updates between playing a batch and learning from it. 0: strictly on-policy
    staleness: Natural = 0


@dataclasses.dataclass(frozen=True)
class BridgeQuestionsConfig:
    # Training questions: "bridge", made here; or parts of data, path,config,split;path,config,split
    train: Filled = BRIDGE
    dev: Filled = BRIDGE  # questions to evaluate on, likewise
    bridge_train: Count = 4000  # number of training questions that are made
    bridge_dev: Count = 300  # number of questions to evaluate on that are made
    bridge_seed: Natural = 0  # of these


@dataclasses.dataclass(frozen=True)
class StageSFTConfig(SFTConfig):
    """Section `sft`: the policy imitates."""

    steps: Count = 100  # optimizer steps of the stage
    batch_size: Count = 16  # rows of a step
    learning_rate: Positive = 1e-3  # peak; its warm-up and decay are over the stage


@dataclasses.dataclass(frozen=True)
class ScriptConfig(StageSFTConfig):
    """Section `script`: the policy imitates scripted demonstrations before it tries anything."""

    # Imitate prompts and what is read, too: a model that knows nothing learns to copy from them
    observed: bool = False

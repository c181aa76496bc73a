"""The stages of an RLVR training: imitation, then rewards, each with an update of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax.sharding import Mesh

from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from qrag_jax.learners.policy_state import Parts, state_shardings
from qrag_jax.learners.token_config import SFTConfig, TokenGRPOConfig
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.agent_experience import Drawn, QuestionOrder
from qrag_jax.systems.rlvr_config import GRPO, SFT, RlvrConfig

_WARM_UP = 25  # imitation warms up for one part of so many


class Stage(NamedTuple):
    """One stage of training.

    Attributes:
        policy: how it learns.
        update: the jitted update.
        parts: what its state is made of.
        first: its first step.
    """

    policy: TokenPolicy
    update: Any
    parts: Parts
    first: int


def stages_of(config: RlvrConfig, mesh: Mesh, model: FirstLanguageModel) -> list[Stage]:
    """The stages of a config, in their order."""
    first, found = 0, []
    for name in config.stages:
        if name == SFT:
            optimizer = dataclasses.replace(
                config.optimizer,
                learning_rate=config.sft.learning_rate,
                total_steps=config.sft_steps * config.sft.epochs,
                schedule="cosine",
                warmup_steps=config.sft_steps // _WARM_UP,
                final_ratio=0.1,
                clip_norm=1.0,
            )
            found.append(_Making(config, mesh, model, config.sft, optimizer, first).stage())
            first = config.sft_steps
        else:
            grpo = _Making(config, mesh, model, config.grpo, config.optimizer, first)
            found.append(grpo.stage())
    return found


class _Making(NamedTuple):
    """What a stage is made of."""

    config: RlvrConfig
    mesh: Mesh
    model: FirstLanguageModel
    algorithm: SFTConfig | TokenGRPOConfig
    optimizer: OptimizerConfig
    first: int

    def stage(self) -> Stage:
        config, model, first = self.config, self.model, self.first
        trunk = model.loaded.model.trunk
        # One state serves all stages, so all of them keep a reference if one needs it.
        keeps = GRPO in config.stages and config.grpo.beta > 0
        parts = Parts(make_optimizer(self.optimizer), None, keeps, trunk.config.hidden_size)
        rules = config.runtime.rules(model.partition_rules)
        schedule = learning_rate_schedule(self.optimizer)
        of_base = None
        if model.adapters is not None:
            of_base = placement.base_shardings(self.mesh, rules, model.loaded.stored)
        policy = TokenPolicy(
            mesh=self.mesh,
            shardings=state_shardings(self.mesh, rules, parts, model.trained),
            trunk=trunk,
            vocabulary=Vocabulary(
                config.sampling.temperature or 1.0, products=trunk.precision.products
            ),
            config=self.algorithm,
            # A part that groups must differ by is a second reward, of no weight.
            weights=(1.0, 0.0) if config.rubric.differ_by else (1.0,),
            optimizer=parts.optimizer,
            schedule=lambda step: schedule(step - first * self.algorithm.epochs),
            base_shardings=of_base,
            lora_scale=model.loaded.model.lora_scale,
        )
        return Stage(policy, make_token_update(policy), parts, first)


@dataclasses.dataclass(frozen=True)
class StagedOrder:
    """The order of questions of two stages, see `agent_experience.QuestionOrder`."""

    first_steps: int
    first: QuestionOrder
    then: QuestionOrder

    def at(self, step: int) -> Drawn:
        """The questions of the batch that step `step` learns from, from 0."""
        if step < self.first_steps:
            return self.first.at(step)
        return self.then.at(step - self.first_steps)

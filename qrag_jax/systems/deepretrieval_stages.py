"""The stages of a DeepRetrieval training: imitation of a script, then PPO or GRPO."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax
from jax.sharding import Mesh

from qrag_jax.learners.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from qrag_jax.learners.policy_state import Parts
from qrag_jax.learners.ppo_config import NONE
from qrag_jax.learners.ppo_update import make_ppo_update
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.systems.deepretrieval_config import PPO, RL, SCRIPT, RewriteConfig
from qrag_jax.systems.token_stages import Stage, StageRules, make_stage

_WARM_UP = 25  # imitation warms up for one part of so many


def stages_of(config: RewriteConfig, mesh: Mesh, model: FirstLanguageModel) -> list[Stage]:
    """The stages of a config, in their order."""
    found = []
    if SCRIPT in config.stages:
        steps = config.script.steps * config.script.epochs
        optimizer = dataclasses.replace(
            config.optimizer,
            learning_rate=config.script.learning_rate,
            total_steps=steps,
            schedule="cosine",
            warmup_steps=steps // _WARM_UP,
            final_ratio=0.1,
            clip_norm=1.0,
        )
        found.append(_rules(config, model, SCRIPT, optimizer))
    if RL in config.stages:
        found.append(_rules(config, model, RL, config.optimizer))
    return [make_stage(config, mesh, model, rules) for rules in found]


def _rules(
    config: RewriteConfig, model: FirstLanguageModel, kind: str, optimizer: OptimizerConfig
) -> StageRules:
    learns, ppo = kind == RL, config.algorithm == PPO
    algorithm: Any = config.rule if learns else config.script
    first = config.first_steps if learns else 0
    per_batch = algorithm.updates_per_batch if learns and ppo else algorithm.epochs
    schedule, critic = learning_rate_schedule(optimizer), _critic(config)
    return StageRules(
        kind=kind,
        algorithm=algorithm,
        parts=_parts(config, make_optimizer(optimizer), critic, model),
        weights=(1.0,),
        schedule=lambda step: schedule(step - first * per_batch),
        make_update=make_ppo_update if learns and ppo else make_token_update,
        first=first,
        critic_optimizer=critic,
        rests_until=first + config.ppo.critic_warmup if learns and ppo else 0,
    )


def _critic(config: RewriteConfig) -> optax.GradientTransformation | None:
    if RL not in config.stages or config.algorithm != PPO or config.ppo.critic == NONE:
        return None
    rate = config.ppo.critic_learning_rate
    return make_optimizer(dataclasses.replace(config.optimizer, learning_rate=rate))


def _parts(
    config: RewriteConfig,
    optimizer: optax.GradientTransformation,
    critic: optax.GradientTransformation | None,
    model: FirstLanguageModel,
) -> Parts:
    """One state serves all stages, so all of them have a reference and a critic if one does."""
    ppo = config.algorithm == PPO
    weight = config.ppo.kl if ppo else config.grpo.beta
    return Parts(
        optimizer,
        critic,
        keeps_reference=RL in config.stages and weight > 0,
        width=model.loaded.model.trunk.config.hidden_size,
    )

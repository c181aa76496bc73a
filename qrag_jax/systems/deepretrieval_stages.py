"""The stages of a DeepRetrieval training: imitation of a script, then PPO or GRPO."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from qrag_jax.learners.policy_state import Parts, next_stage, state_shardings
from qrag_jax.learners.ppo_config import NONE
from qrag_jax.learners.ppo_update import make_ppo_update
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.systems.deepretrieval_config import PPO, RL, SCRIPT, RewriteConfig

_WARM_UP = 25  # imitation warms up for one part of so many


class Stage(NamedTuple):
    """One stage of training.

    Attributes:
        kind: script or rl.
        policy: how it learns.
        update: the jitted update.
        parts: what its state is made of.
        begin: state → the state with which it begins behind another stage; of adapters it takes
            their base, too.
        first: its first step.
    """

    kind: str
    policy: TokenPolicy[Any]
    update: Any
    parts: Parts
    begin: Any
    first: int


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
        found.append(_stage(config, mesh, model, SCRIPT, optimizer))
    if RL in config.stages:
        found.append(_stage(config, mesh, model, RL, config.optimizer))
    return found


def _stage(
    config: RewriteConfig,
    mesh: Mesh,
    model: FirstLanguageModel,
    kind: str,
    optimizer: OptimizerConfig,
) -> Stage:
    trunk, ppo = model.loaded.model.trunk, config.algorithm == PPO
    algorithm: Any = config.script if kind == SCRIPT else config.rule
    first = config.first_steps if kind == RL else 0
    per_batch = algorithm.updates_per_batch if kind == RL and ppo else algorithm.epochs
    schedule = learning_rate_schedule(optimizer)
    critic = _critic(config)
    parts = _parts(config, make_optimizer(optimizer), critic, model)
    rules = config.runtime.rules(model.partition_rules)
    of_base = None
    if model.base is not None:
        of_base = placement.base_shardings(mesh, rules, model.base)
    policy: TokenPolicy[Any] = TokenPolicy(
        mesh=mesh,
        shardings=state_shardings(mesh, rules, parts, model.trained, model.base),
        trunk=trunk,
        vocabulary=Vocabulary(
            config.sampling.temperature or 1.0, products=trunk.precision.products
        ),
        config=algorithm,
        weights=(1.0,),
        optimizer=parts.optimizer,
        schedule=lambda step: schedule(step - first * per_batch),
        base_shardings=of_base,
        lora_scale=parts.lora_scale,
        critic_optimizer=critic,
        rests_until=first + config.ppo.critic_warmup if kind == RL and ppo else 0,
    )
    make = make_ppo_update if kind == RL and ppo else make_token_update
    begin = jax.jit(partial(next_stage, parts), out_shardings=policy.shardings)
    return Stage(kind, policy, make(policy), parts, begin, first)


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
        critic=config.ppo.critic,
        lora_scale=model.loaded.model.lora_scale,
        kl_weight=config.ppo.kl if ppo and config.ppo.kl_target else None,
    )

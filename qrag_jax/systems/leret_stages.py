"""The updates of LeReT's stages: imitation of a script, imitation of tries, preferences."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.policy_state import Parts, next_stage, state_shardings
from qrag_jax.learners.preference_update import make_preference_update
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.systems.leret_config import PREFERENCE, LeretConfig

_WARM_UP = 25  # a stage warms up for one part of so many


class Learner(NamedTuple):
    """How stages of one kind learn.

    Attributes:
        policy: the model and its algorithm.
        update: the jitted update.
        parts: what its state is made of.
        begin: state → the state with which a stage begins behind another one.
    """

    policy: TokenPolicy[Any]
    update: Any
    parts: Parts
    begin: Any


def learner_of(kind: str, config: LeretConfig, mesh: Mesh, model: FirstLanguageModel) -> Learner:
    """The learner of the stages of a kind; every iteration has the same one."""
    algorithm: Any = getattr(config, kind)
    steps = algorithm.steps * getattr(algorithm, "epochs", 1)
    optimizer = dataclasses.replace(
        config.optimizer,
        learning_rate=algorithm.learning_rate,
        total_steps=steps,
        warmup_steps=min(config.optimizer.warmup_steps, steps // _WARM_UP),
    )
    trunk = model.loaded.model.trunk
    parts = Parts(make_optimizer(optimizer), None, False, trunk.config.hidden_size)
    rules = config.runtime.rules(model.partition_rules)
    of_base = None
    if model.adapters is not None:
        of_base = placement.base_shardings(mesh, rules, model.loaded.stored)
    firsts = [each.first for each in config.plan if each.kind == kind]
    # Stages of a kind begin again after as many steps as an iteration has.
    period = firsts[1] - firsts[0] if len(firsts) > 1 else config.train.steps
    schedule = learning_rate_schedule(optimizer)
    policy: TokenPolicy[Any] = TokenPolicy(
        mesh=mesh,
        shardings=state_shardings(mesh, rules, parts, model.trained),
        trunk=trunk,
        vocabulary=Vocabulary(
            config.sampling.temperature or 1.0, products=trunk.precision.products
        ),
        config=algorithm,
        weights=(),
        optimizer=parts.optimizer,
        schedule=lambda step: schedule((step - firsts[0]) % period),
        base_shardings=of_base,
        lora_scale=model.loaded.model.lora_scale,
    )
    make = make_preference_update if kind == PREFERENCE else make_token_update
    begin = jax.jit(partial(next_stage, parts), out_shardings=policy.shardings)
    return Learner(policy, make(policy), parts, begin)

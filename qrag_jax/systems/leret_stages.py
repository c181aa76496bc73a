"""The updates of LeReT's stages: imitation of a script, imitation of tries, preferences."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.policy_state import Parts
from qrag_jax.learners.preference_update import make_preference_update
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.systems.leret_config import PREFERENCE, LeretConfig
from qrag_jax.systems.token_stages import Stage, StageRules, make_stage

_WARM_UP = 25  # a stage warms up for one part of so many


def stages_of(config: LeretConfig, mesh: Mesh, model: FirstLanguageModel) -> list[Stage]:
    """The stages of a config, in their order; those of a kind differ in their first step alone."""
    width = model.loaded.model.trunk.config.hidden_size
    by_kind = {
        kind: make_stage(config, mesh, model, _rules(kind, config, width))
        for kind in dict.fromkeys(each.kind for each in config.plan)
    }
    return [by_kind[each.kind]._replace(first=each.first) for each in config.plan]


def _rules(kind: str, config: LeretConfig, width: int) -> StageRules:
    """Of the first stage of a kind."""
    algorithm: Any = getattr(config, kind)
    steps = algorithm.steps * getattr(algorithm, "epochs", 1)
    optimizer = dataclasses.replace(
        config.optimizer,
        learning_rate=algorithm.learning_rate,
        total_steps=steps,
        warmup_steps=min(config.optimizer.warmup_steps, steps // _WARM_UP),
    )
    firsts = [each.first for each in config.plan if each.kind == kind]
    # Stages of a kind begin again after as many steps as an iteration has.
    period = firsts[1] - firsts[0] if len(firsts) > 1 else config.train.steps
    schedule = learning_rate_schedule(optimizer)
    return StageRules(
        kind=kind,
        algorithm=algorithm,
        parts=Parts(make_optimizer(optimizer), None, False, width),
        weights=(),
        schedule=lambda step: schedule((step - firsts[0]) % period),
        make_update=make_preference_update if kind == PREFERENCE else make_token_update,
        first=firsts[0],
    )

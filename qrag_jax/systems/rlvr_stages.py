"""The stages of an RLVR training: imitation, then rewards, each with an update of its own."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from qrag_jax.learners.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from qrag_jax.learners.policy_state import Parts
from qrag_jax.learners.token_config import SFTConfig, TokenGRPOConfig
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.systems.rlvr_config import GRPO, SFT, RlvrConfig
from qrag_jax.systems.token_stages import Stage, StageRules, make_stage

_WARM_UP = 25  # imitation warms up for one part of so many


def stages_of(config: RlvrConfig, mesh: Mesh, model: FirstLanguageModel) -> list[Stage]:
    """The stages of a config, in their order."""
    width = model.loaded.model.trunk.config.hidden_size
    return [make_stage(config, mesh, model, _rules(kind, config, width)) for kind in config.stages]


def _rules(kind: str, config: RlvrConfig, width: int) -> StageRules:
    algorithm: SFTConfig | TokenGRPOConfig = config.sft if kind == SFT else config.grpo
    optimizer = _of_imitation(config) if kind == SFT else config.optimizer
    first = 0 if kind == SFT else config.sft_steps
    schedule = learning_rate_schedule(optimizer)
    # One state serves all stages, so all of them keep a reference if one needs it.
    keeps = GRPO in config.stages and config.grpo.beta > 0
    return StageRules(
        kind=kind,
        algorithm=algorithm,
        parts=Parts(make_optimizer(optimizer), None, keeps, width),
        # A part that groups must differ by is a second reward, of no weight.
        weights=(1.0, 0.0) if config.rubric.differ_by else (1.0,),
        schedule=lambda step: schedule(step - first * algorithm.epochs),
        make_update=make_token_update,
        first=first,
    )


def _of_imitation(config: RlvrConfig) -> OptimizerConfig:
    return dataclasses.replace(
        config.optimizer,
        learning_rate=config.sft.learning_rate,
        total_steps=config.sft_steps * config.sft.epochs,
        schedule="cosine",
        warmup_steps=config.sft_steps // _WARM_UP,
        final_ratio=0.1,
        clip_norm=1.0,
    )

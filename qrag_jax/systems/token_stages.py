"""Makes a stage of training of a language model: its policy, its state and its jitted update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from qrag_jax.errors import InputError
from qrag_jax.learners import placement
from qrag_jax.learners.policy_state import Parts, next_stage, state_shardings
from qrag_jax.learners.ppo_config import TokenPPOConfig
from qrag_jax.learners.token_config import TokenGRPOConfig
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.llm.text.scaffolds import scaffold_of
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.systems.token_config import TokenConfig


class Stage(NamedTuple):
    """One stage of training.

    Attributes:
        kind: names what is learned.
        policy: how it learns.
        update: the jitted update.
        parts: what its state is made of.
        begin: state → the state with which it begins behind another stage.
        first: its first step.
    """

    kind: str
    policy: TokenPolicy[Any]
    update: Any
    parts: Parts
    begin: Any
    first: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRules:
    """How a stage learns.

    Attributes:
        kind: names what is learned.
        algorithm: constants of it.
        parts: what its state is made of.
        weights: of the parts of an episode's reward.
        schedule: optimizer step of the run → learning rate.
        make_update: makes the jitted update of a policy.
        first: its first step.
        critic_optimizer: None: there is no critic.
        rests_until: the step of the run before which the critic learns alone.
    """

    kind: str
    algorithm: Any
    parts: Parts
    weights: tuple[float, ...]
    schedule: Callable[[Any], Any]
    make_update: Callable[[TokenPolicy[Any]], Any]
    first: int
    critic_optimizer: optax.GradientTransformation | None = None
    rests_until: int = 0


def make_stage(
    config: TokenConfig, mesh: Mesh, model: FirstLanguageModel, rules: StageRules
) -> Stage:
    """The stage of a run on a mesh."""
    loaded, parts = model.loaded, rules.parts
    trunk, partition = loaded.model.trunk, config.runtime.rules(model.partition_rules)
    # Rewards teach the policy that sampled; what is imitated or preferred, the model itself.
    by_rewards = isinstance(rules.algorithm, TokenGRPOConfig | TokenPPOConfig)
    temperature = config.sampling.temperature if by_rewards else 1.0
    of_base = None
    if model.base is not None:
        of_base = placement.base_shardings(mesh, partition, model.base)
    policy: TokenPolicy[Any] = TokenPolicy(
        mesh=mesh,
        shardings=state_shardings(mesh, partition, parts, model.trained),
        trunk=trunk,
        vocabulary=Vocabulary(temperature, products=trunk.precision.products),
        config=rules.algorithm,
        weights=rules.weights,
        optimizer=parts.optimizer,
        schedule=rules.schedule,
        base_shardings=of_base,
        lora_scale=loaded.model.lora_scale,
        critic_optimizer=rules.critic_optimizer,
        rests_until=rules.rests_until,
    )
    begin = jax.jit(partial(next_stage, parts), out_shardings=policy.shardings)
    return Stage(rules.kind, policy, rules.make_update(policy), parts, begin, rules.first)


def speech_of(config: TokenConfig, model: FirstLanguageModel, turn: int) -> Speech:
    """Between the text and the ids of a model.

    Args:
        turn: most tokens that a turn may sample.
    """
    thinking = {"": None, "on": True, "off": False}[config.model.thinking]
    loaded, room = model.loaded, config.sampling.room
    if room > loaded.model.max_positions:
        raise InputError(
            f"config.sampling.room is {room}, but {model.folder} has "
            f"{loaded.model.max_positions} positions; lower it."
        )
    return Speech(loaded.tokenizer, scaffold_of(loaded.tokenizer, thinking=thinking), turn, room)

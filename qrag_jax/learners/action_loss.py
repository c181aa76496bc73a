"""The loss of an action, which is a search or a sampled token: GRPO's, PPO's, or imitation's."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.algorithms.advantages import explained_variance, gae, whitened
from qrag_jax.algorithms.policy_gradient import (
    USUAL,
    Correction,
    Departure,
    clipped,
    clipped_weight,
    departure,
    kl_k1,
    kl_k3,
    of_sequence,
    sampler_weights,
    weighted_sum,
)
from qrag_jax.learners.config import CISPO, REWARD, SEQUENCE, PPOConfig, SFTConfig
from qrag_jax.learners.state import Critic, TrainState
from qrag_jax.learners.update import Learner, Metrics, Step
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.policies.tokens import TokenScores


class PerAction(NamedTuple):
    """What is learned from each action; float32 of one shape.

    old: log-probabilities before the update; read if it has several steps, or acted before.
    reference: by the first weights of the stage; read if a KL is to them.
    advantages: A.
    weight: of the action's losses in their sums; 0: it is not learned from.
    value: PPO's, by the critic before the update.
    returns: PPO's, what values are regressed on.
    """

    old: jax.Array
    reference: jax.Array
    advantages: jax.Array
    weight: jax.Array
    value: jax.Array
    returns: jax.Array


class Losses(NamedTuple):
    """Of each action.

    each: the losses.
    ratios: log-probabilities whose ratio to `old` the losses have.
    old: log-probabilities before the update.
    kl: to the reference.
    """

    each: jax.Array
    ratios: jax.Array
    old: jax.Array
    kl: jax.Array


class Sums(NamedTuple):
    """Totals over the actions that are learned from.

    correction: of a sampler, if any.
    gap: of |log π − stored log π_old|, if these are stored.
    """

    loss: jax.Array
    entropy: jax.Array
    reference_kl: jax.Array
    departure: Departure
    correction: Correction | None
    tokens: TokenCount
    gap: jax.Array | None = None


def action_losses(
    config: Any,
    scores: TokenScores,
    targets: PerAction,
    *,
    is_fresh: bool,
    sampler: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> Losses:
    """The clipped surrogate, weighted for the sampler, the KL and the entropy; or `−log π`.

    Args:
        config: of GRPO, PPO or imitation.
        is_fresh: the actions are of the policy that learns.
        sampler: log-probabilities by what sampled; None: the policy itself did.
        rows: `[R, N]`, which action is of which row, where a ratio is of a whole row.
    """
    new, nothing = scores.log_probs, jnp.zeros_like(scores.log_probs)
    if isinstance(config, SFTConfig):
        return Losses(-new, new, jax.lax.stop_gradient(new), nothing)
    old = jax.lax.stop_gradient(new) if is_fresh else targets.old
    ratio, ratios, kl = getattr(config, "ratio", None), new, nothing
    if ratio == SEQUENCE:
        assert rows is not None
        ratios = _of_rows(new, old, rows & (targets.weight > 0)[None])
    surrogate = clipped_weight if ratio == CISPO else clipped
    losses = surrogate(ratios, old, targets.advantages, config.clip)
    if sampler is not None:
        losses = losses * sampler_weights(old, sampler, config.sampler_cap)
    if config.kl_weight:
        kl = kl_k3(new, targets.reference)
        losses += config.kl_weight * kl
    if entropy := getattr(config, "entropy", 0.0):
        losses -= entropy * scores.entropy
    return Losses(losses, ratios, old, kl)


def summed(
    config: Any,
    losses: Losses,
    scores: TokenScores,
    targets: PerAction,
    *,
    tokens: TokenCount,
    correction: Correction | None = None,
) -> Sums:
    """The weighed loss, and the sums beside it."""
    valid, clip = targets.weight > 0, getattr(config, "clip", USUAL)
    # What is clipped is of the ratios that the loss has; a KL is of actions.
    away = departure(losses.ratios, losses.old, targets.advantages, valid, clip)
    apart = departure(scores.log_probs, losses.old, targets.advantages, valid, clip)
    return Sums(
        loss=weighted_sum(losses.each, targets.weight),
        entropy=jnp.where(valid, scores.entropy, 0.0).sum(),
        reference_kl=jnp.where(valid, losses.kl, 0.0).sum(),
        departure=away._replace(kl=apart.kl),
        correction=correction,
        tokens=tokens,
    )


class StepResult(NamedTuple):
    """What one optimizer step tells; `tokens` are those of policy and critic."""

    sums: Sums
    value_loss: jax.Array  # summed
    divisor: jax.Array
    step: Step
    tokens: TokenCount


def learn_actions(
    learner: Learner,
    passes: tuple[Any, Any],
    state: TrainState,
    *part: Any,
    divisor: jax.Array,
    awake: jax.Array | bool = True,
) -> tuple[TrainState, StepResult]:
    """One optimizer step of the policy, and of its critic if there is one.

    Args:
        passes: of policy and critic, or None; `gradient(params, *part)` gives those of the summed
            loss, as a `Critic`, and sums. Those of a critic are its loss and its tokens.
    """
    of_policy, of_critic = passes
    learned, sums = of_policy.gradient(Critic(state.params), *part)
    critic, value_loss, tokens = None, jnp.zeros((), jnp.float32), sums.tokens
    if of_critic is not None:
        critic, (value_loss, used) = of_critic.gradient(state.critic, *part)
        tokens = TokenCount.total([tokens, used])
    gradients, loss = (learned.tower, critic), sums.loss + value_loss
    state, step = learner.learn(state, gradients, loss, divisor, awake=awake)
    return state, StepResult(sums, value_loss, divisor, step, tokens)


def ppo_actions(
    config: PPOConfig, rewards: jax.Array, targets: PerAction, valid: jax.Array, ends: jax.Array
) -> tuple[PerAction, Metrics]:
    """PPO's advantages and returns of given values, and metrics; arrays are of one shape.

    Args:
        rewards: of each action, without a KL.
        valid: actions that are learned from, in order on the last axis.
        ends: the last action of each episode.
    """
    number = jnp.maximum(valid.sum().astype(jnp.float32), 1.0)
    metrics: Metrics = {}
    if config.kl and getattr(config, "kl_in", REWARD) == REWARD:
        kl = jnp.where(valid, kl_k1(targets.old, targets.reference), 0.0)
        rewards = rewards - config.kl * kl
        metrics["kl"] = kl.sum() / number
    discounts = config.gamma, config.lambda_
    advantages, returns = gae(rewards, targets.value, valid, ends, discounts)
    metrics["advantage"] = jnp.abs(advantages).sum() / number
    metrics["explained_variance"] = explained_variance(returns, targets.value, valid)
    if config.whiten:
        advantages = whitened(advantages, valid)
    return targets._replace(advantages=advantages, returns=returns), metrics


def departure_metrics(sums: Sums) -> Metrics:
    """How far the policy has gone from the one that acted, over all steps of an update."""
    actions = jnp.maximum(sums.departure.actions.sum(), 1.0)
    return {
        "clip_fraction": sums.departure.clipped.sum() / actions,
        "kl_old": sums.departure.kl.sum() / actions,
        "largest_ratio": sums.departure.largest.max(),
    }


def _of_rows(new: jax.Array, old: jax.Array, rows: jax.Array) -> jax.Array:
    """`of_sequence` of tokens `[S]`, where `rows` `[R, S]` says which token is of which row."""
    by_row = of_sequence(jnp.broadcast_to(new, rows.shape), jnp.broadcast_to(old, rows.shape), rows)
    return jnp.where(rows.any(axis=0), jnp.where(rows, by_row, 0.0).sum(axis=0), new)

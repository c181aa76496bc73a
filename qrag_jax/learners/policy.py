"""One update of all policies whose actions have log-probabilities: searches, tokens, or pairs.

A kind of policy gives the gradient of its rows' losses and what is learned from each action. The
losses of GRPO, PPO and imitation, the optimizer steps of a batch and their metrics are here.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.algorithms.advantages import explained_variance, gae, whitened
from qrag_jax.algorithms.policy_gradient import (
    clipped,
    clipped_weight,
    is_clipped,
    kl_k1,
    kl_k3,
    largest_ratio,
    of_sequence,
    sampler_weights,
    weighted_sum,
)
from qrag_jax.learners.config import CISPO, REWARD, SEQUENCE, PPOConfig, SFTConfig
from qrag_jax.learners.state import Critic, TrainState
from qrag_jax.learners.update import Learner, Metrics, Sums, over_axis, padding_share
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.models.heads.embedding import Params
from qrag_jax.policies.tokens import TokenScores

# Metrics of all steps of an update; the other ones are of the first pass over the batch.
_OF_ALL_STEPS = ("clip_fraction", "kl_old", "largest_ratio")


class PerAction(NamedTuple):
    """What is learned from each action; float32 of one shape."""

    # Log-probabilities before the update; read if it has several steps, or acted before
    old: jax.Array
    reference: jax.Array  # by the first weights of the stage; read if a KL is to them
    advantages: jax.Array
    weight: jax.Array  # of the action's losses in their sums; 0: it is not learned from
    value: jax.Array  # PPO's, by the critic before the update
    returns: jax.Array  # PPO's, what values are regressed on


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLearner(Learner):
    """A policy whose actions have log-probabilities, and perhaps a critic."""

    @abc.abstractmethod
    def gradient(self, learned: Critic, base: Params | None, part: Any) -> tuple[Critic, Sums]:
        """The gradient of the summed loss of a policy (`Critic(params)`) or critic, and the sums.

        Args:
            part: rows, and what is learned from each action.
        """

    def learn_in_steps(
        self,
        state: TrainState,
        base: Params | None,
        part_of: Callable[[Any], Any],
        order: np.ndarray | jax.Array | None,
        divisors: jax.Array,
        *,
        one_pass: int = 1,
        awake: jax.Array | bool = True,
    ) -> tuple[TrainState, Metrics]:
        """Optimizer steps of the policy and, if there is one, of its critic, and their metrics.

        Means over the first pass: `entropy` and others of the policy before it learns. Over all
        steps: `clip_fraction`, `kl_old` and `largest_ratio` to the policy that acted, `loss`,
        `value_loss` and `grad_norm`, `critic_grad_norm`. Then `learning_rate`, `padding_share` and
        `skipped`, 1 if a step was not finite and learned nothing.

        Args:
            part_of: an entry of `order` → what a step learns from, as `gradient` takes it.
            order: `[steps, …]`; None: there is one step.
            divisors: `[steps]`, of the sums of losses, above 0.
            one_pass: steps of the first pass.
            awake: else the critic alone learns.
        """

        def step(state: TrainState, at: tuple[Any, jax.Array]) -> tuple[TrainState, tuple]:
            place, divisor = at
            part = part_of(place)
            learned, sums = self.gradient(Critic(state.params), base, part)
            critic, metrics = None, {"loss": sums.loss / divisor}
            # The state has a critic in a stage of imitation, too, if a later stage needs it.
            if state.critic is not None and isinstance(self.config, PPOConfig):
                critic, of_values = self.gradient(state.critic, base, part)
                metrics["value_loss"] = of_values.loss / divisor
                sums = sums._replace(tokens=TokenCount.total([sums.tokens, of_values.tokens]))
            loss = metrics["loss"] + metrics.get("value_loss", 0.0)
            gradients = learned.tower, critic
            state, learned_by = self.learn(state, gradients, loss, divisor, awake=awake)
            return state, (sums, metrics | learned_by)

        if len(divisors) > 1:
            state, collected = jax.lax.scan(step, state, (order, divisors))
        else:
            state, collected = step(state, jax.tree.map(lambda leaf: leaf[0], (order, divisors)))
            collected = jax.tree.map(lambda leaf: leaf[None], collected)
        sums, by_step = collected
        metrics = over_axis(jax.tree.map(lambda leaf: leaf[:one_pass], sums)).metrics()
        every = over_axis(sums).metrics()
        metrics |= {name: every[name] for name in _OF_ALL_STEPS if name in every}
        metrics |= {name: each.mean() for name, each in by_step.items()}
        metrics["skipped"] = by_step["skipped"].max()
        metrics["learning_rate"] = self.schedule(state.step * len(divisors))
        return state, metrics | padding_share(sums.tokens)


# ------------------------------------------------------------------------ losses


def action_loss(
    config: Any,
    scores: TokenScores,
    targets: PerAction,
    *,
    tokens: TokenCount,
    is_fresh: bool,
    sampler: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> Sums:
    """The clipped surrogate, weighted for the sampler, the KL and the entropy; or `−log π`.

    Args:
        config: of GRPO, PPO or imitation.
        is_fresh: the actions are of the policy that learns.
        sampler: of tokens, log-probabilities by what sampled; None: the policy itself did.
        rows: `[R, N]`, which action is of which row, where a ratio is of a whole row.
    """
    new, weight = scores.log_probs, targets.weight
    valid, means = weight > 0, {}
    number = valid.sum().astype(jnp.float32)

    def mean(name: str, of_actions: jax.Array) -> None:
        means[name] = jnp.where(valid, of_actions, 0.0).sum(), number

    mean("entropy", scores.entropy)
    if isinstance(config, SFTConfig):
        return Sums(weighted_sum(-new, weight), tokens, means, {})
    old = jax.lax.stop_gradient(new) if is_fresh else targets.old
    ratio, ratios = getattr(config, "ratio", None), new
    if ratio == SEQUENCE:
        assert rows is not None
        ratios = _of_rows(new, old, rows & valid[None])
    surrogate = clipped_weight if ratio == CISPO else clipped
    losses = surrogate(ratios, old, targets.advantages, config.clip)
    # What is clipped is of the ratios that the loss has; a KL is of actions.
    mean("clip_fraction", is_clipped(ratios, old, targets.advantages, config.clip))
    mean("kl_old", kl_k3(old, new))
    largest = {"largest_ratio": largest_ratio(ratios, old, valid)}
    kl = kl_k3(new, targets.reference) if config.kl_weight else jnp.zeros_like(new)
    if sampler is not None:
        weights = sampler_weights(old, sampler, config.sampler_cap)
        losses = losses * weights
        mean("kl", kl)
        mean("sampler_kl", kl_k3(sampler, old))
        mean("sampler_truncated", old - sampler > jnp.log(config.sampler_cap))
        mean("sampler_weight", weights)
        mean("sampler_square", jnp.square(weights))
        largest["sampler_largest_ratio"] = largest_ratio(old, sampler, valid)
    losses += config.kl_weight * kl
    if entropy := getattr(config, "entropy", 0.0):
        losses -= entropy * scores.entropy
    return Sums(weighted_sum(losses, weight), tokens, means, largest)


def _of_rows(new: jax.Array, old: jax.Array, rows: jax.Array) -> jax.Array:
    """`of_sequence` of tokens `[S]`, where `rows` `[R, S]` says which token is of which row."""
    by_row = of_sequence(jnp.broadcast_to(new, rows.shape), jnp.broadcast_to(old, rows.shape), rows)
    return jnp.where(rows.any(axis=0), jnp.where(rows, by_row, 0.0).sum(axis=0), new)


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

"""One update of all policies: searches of two towers or of a query encoder, tokens, or pairs.

A learner gives the gradients of a summed loss. All else is here: the losses of actions with
log-probabilities (GRPO, PPO, imitation), the optimizer steps of a batch and their metrics.
Gradients are divided, checked and applied, targets and critic follow, steps are counted, and the
jitted program gets the state's buffers to write into.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms import policy_gradient
from qrag_jax.algorithms.advantages import explained_variance, gae, whitened
from qrag_jax.learners.config import CISPO, REWARD, SEQUENCE, PPOConfig, SFTConfig
from qrag_jax.learners.optimizers import keep_unless, optimizer_step
from qrag_jax.learners.state import Critic, Parts, TrainState, both_towers, place, shapes_on
from qrag_jax.models.embedding import Params
from qrag_jax.models.pretrained import Loaded
from qrag_jax.runtime.mesh import shardings_of
from qrag_jax.runtime.platform import compiler_options

if TYPE_CHECKING:  # towers have no tokens
    from qrag_jax.policies.tokens import TokenScores

Metrics = dict[str, jax.Array]
Update = Callable[..., tuple[TrainState, Metrics]]  # (state, episodes), then a base if any
REPLICATED = PartitionSpec()
# Metrics of all steps of an update; the other ones are of the first pass over the batch.
_OF_ALL_STEPS = ("clip_fraction", "kl_old", "largest_ratio")
Tree = TypeVar("Tree")


class Sums(NamedTuple):
    """Totals of a batch or of a part of it; those of parts are `added` to those of the whole."""

    loss: jax.Array  # what the gradient is of
    # by the name of a metric, its sum and the number that it is a mean over
    means: dict[str, tuple[jax.Array, jax.Array]]
    largest: dict[str, jax.Array]  # by the name of a metric, its highest value
    tokens: Any = None  # float32 `[2]`, those that carry text, and those computed

    def metrics(self) -> Metrics:
        """The means, 0 where they are over nothing, and the highest values."""
        means = {
            name: total / jnp.where(number > 0, number, 1.0)
            for name, (total, number) in self.means.items()
        }
        return means | self.largest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """A policy and how it learns; the kinds of policies add what they compute with."""

    mesh: Mesh
    shardings: TrainState  # where the training state lives (`Parts.shardings`)
    parts: Parts  # what the state is made of; its optimizers
    schedule: optax.Schedule  # optimizer step → learning rate
    # where the frozen base of adapters lives; None if all weights are trained
    base_shardings: Params | None = None
    config: Any = None  # constants of the algorithm

    @classmethod
    def of(cls, mesh: Mesh, loaded: Loaded, parts: Parts, **further: Any) -> Self:
        """The learner that starts from a loaded model; `further` are the other fields."""
        rules = loaded.trunk.partition_rules()
        return cls(
            mesh=mesh,
            shardings=parts.shardings(mesh, rules, loaded.trained),
            parts=parts,
            base_shardings=shardings_of(mesh, rules, loaded.base),
            **further,
        )

    @property
    def gradient_passes(self) -> int:
        """Forward passes that cost as much as a gradient; frozen weights have none of their own."""
        return 3 if self.base_shardings is None else 2

    def on_mesh(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding of an array that is split so."""
        return NamedSharding(self.mesh, spec)

    def first_state(self, tower: Params, seed: int, second: Params | None = None) -> TrainState:
        """The first state on the mesh; no device ever holds more than its part of an array.

        The towers are as `both_towers` takes them.
        """
        of_params = self.shardings.params
        targets = self.parts.has_targets
        params = both_towers(of_params, tower, second) if targets else place(tower, of_params)
        build = jax.jit(self.parts.build, out_shardings=self.shardings)
        return build(params, jax.random.key(seed))

    def placed_base(self, stored: Params, *, placed: bool = True) -> tuple[Params, ...]:
        """The frozen base of adapters on the mesh, or its shapes; () if all weights are trained."""
        if self.base_shardings is None:
            return ()
        return ((place if placed else shapes_on)(stored, self.base_shardings),)

    @cached_property
    def next_stage(self) -> Callable[[TrainState], TrainState]:
        """Makes the state with which a later stage of training begins: its moments are zero.

        A KL is to the parameters of its start; targets and a critic begin as the policy is then.
        """

        def build(state: TrainState) -> TrainState:
            begun = self.parts.build(state.params, state.key)
            return begun._replace(step=state.step, env_steps=state.env_steps)

        return jax.jit(build, out_shardings=self.shardings)

    def program(
        self, function: Callable[..., Any], placed: tuple[Any, ...], out: Any, *donated: int
    ) -> Callable[..., Any]:
        """The jitted function, which takes a base as its last argument if there is one.

        Args:
            placed: shardings of all other arguments.
            out: shardings of what it returns.
            donated: numbers of the arguments whose buffers it may write into.
        """
        base = self.base_shardings
        return jax.jit(
            function,
            donate_argnums=donated,
            in_shardings=placed if base is None else (*placed, base),
            out_shardings=out,
            compiler_options=compiler_options(self.mesh, adapters=base is not None),
        )

    def update(self, function: Callable[..., Any], episodes: Any) -> Update:
        """The program `(state, episodes) → (state, metrics)`; the state's buffers are donated.

        With adapters it is `(state, episodes, base)`; the base is neither changed nor donated.
        Metrics are float32 scalars. `episodes` are shardings of what is learned from.
        """
        out = self.shardings, self.on_mesh(REPLICATED)
        return self.program(function, (self.shardings, episodes), out, 0)

    def learn(
        self,
        state: TrainState,
        gradients: tuple[Params, Critic | None],
        loss: jax.Array,
        divisor: jax.Array,
        *,
        tau: float = 0.0,
        awake: jax.Array | bool = True,
    ) -> tuple[TrainState, Metrics]:
        """One optimizer step on the mean loss, then `target ← (1-τ)·target + τ·online`.

        If the loss or a gradient's norm is not finite, nothing is learned: parameters, critic,
        targets and moments stay the same, bit for bit; the schedules still advance. The counts of
        the state are the old ones (`counted`).

        Args:
            gradients: of the summed loss.
            divisor: of the gradients' sums, above 0.
            awake: else the policy learns nothing either.

        Returns:
            The state, and `skipped` and the norms of the gradients before clipping.
        """
        of_policy, of_critic = jax.tree.map(lambda leaf: leaf / divisor, gradients)
        metrics = {"grad_norm": optax.tree.norm(of_policy)}
        if of_critic is not None:
            metrics["critic_grad_norm"] = optax.tree.norm(of_critic)
        finite = jnp.isfinite(jnp.stack([loss, *metrics.values()])).all()
        params, opt_state = optimizer_step(
            state.params, state.opt_state, of_policy, self.parts.optimizer, finite & awake
        )
        state = state._replace(params=params, opt_state=opt_state)
        if of_critic is not None:
            assert self.parts.critic_optimizer is not None
            critic, critic_opt_state = optimizer_step(
                state.critic, state.critic_opt_state, of_critic, self.parts.critic_optimizer, finite
            )
            state = state._replace(critic=critic, critic_opt_state=critic_opt_state)
        if state.target_params is not None:
            moved = optax.incremental_update(params, state.target_params, tau)
            state = state._replace(target_params=keep_unless(finite, moved, state.target_params))
        return state, metrics | {"skipped": 1.0 - finite.astype(jnp.float32)}


def padding_share(tokens: jax.Array) -> Metrics:
    """The share of the computed tokens that carry no text; the counts may be of several steps."""
    real, computed = tokens.reshape(-1, 2).sum(axis=0)
    return {"padding_share": 1.0 - real / jnp.maximum(computed, 1.0)}


def counted(state: TrainState, actions: jax.Array, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """The state after an update from so many actions, and the metrics with their sum."""
    env_steps = state.env_steps + actions.astype(jnp.int32)
    state = state._replace(step=state.step + 1, env_steps=env_steps)
    return state, metrics | {"env_steps": env_steps.astype(jnp.float32)}


# ------------------------------------------------------------------------ sums


def flattened(leaf: jax.Array) -> jax.Array:
    """`[N, T, …]` → `[N · T, …]`."""
    return leaf.reshape(-1, *leaf.shape[2:])


def added(one: Tree, other: Tree) -> Tree:
    """The sums of two parts of a batch, as one."""
    return _totals(jnp.add, jnp.maximum, one, other)


def over_axis(sums: Tree) -> Tree:
    """The sums of parts of a batch, `[parts, …]`, as one."""
    return _totals(partial(jnp.sum, axis=0), partial(jnp.max, axis=0), sums)


def _totals(add: Callable[..., Any], highest: Callable[..., Any], *trees: Tree) -> Tree:
    def total(path: tuple[Any, ...], *leaves: jax.Array) -> jax.Array:
        is_largest = any(getattr(key, "name", "") == "largest" for key in path)
        return (highest if is_largest else add)(*leaves)

    return jax.tree_util.tree_map_with_path(total, *trees)


# ------------------------------------------------------------------------ actions with log-probs


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

    @property
    def update_passes(self) -> int:
        """Forward passes over a batch that cost as much as an update."""
        config, critic = self.config, isinstance(self.config, PPOConfig)
        gradients = (1 + critic) * getattr(config, "epochs", 1) * self.gradient_passes
        return gradients + critic + bool(getattr(config, "kl_weight", 0.0))

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
                sums = sums._replace(tokens=sums.tokens + of_values.tokens)
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
        metrics |= {name: values.mean() for name, values in by_step.items()}
        metrics["skipped"] = by_step["skipped"].max()
        metrics["learning_rate"] = self.schedule(state.step * len(divisors))
        return state, metrics | padding_share(sums.tokens)


# ------------------------------------------------------------------------ losses


def action_loss(
    config: Any,
    scores: TokenScores,
    targets: PerAction,
    *,
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
        return Sums(policy_gradient.weighted_sum(-new, weight), means, {})
    old = jax.lax.stop_gradient(new) if is_fresh else targets.old
    ratio, ratios = getattr(config, "ratio", None), new
    if ratio == SEQUENCE:
        assert rows is not None
        ratios = _of_rows(new, old, rows & valid[None])
    surrogate = policy_gradient.clipped_weight if ratio == CISPO else policy_gradient.clipped
    losses = surrogate(ratios, old, targets.advantages, config.clip)
    # What is clipped is of the ratios that the loss has; a KL is of actions.
    mean("clip_fraction", policy_gradient.is_clipped(ratios, old, targets.advantages, config.clip))
    mean("kl_old", policy_gradient.kl_k3(old, new))
    largest = {"largest_ratio": policy_gradient.largest_ratio(ratios, old, valid)}
    kl = policy_gradient.kl_k3(new, targets.reference) if config.kl_weight else jnp.zeros_like(new)
    if sampler is not None:
        weights = policy_gradient.sampler_weights(old, sampler, config.sampler_cap)
        losses = losses * weights
        mean("kl", kl)
        mean("sampler_kl", policy_gradient.kl_k3(sampler, old))
        mean("sampler_truncated", old - sampler > jnp.log(config.sampler_cap))
        mean("sampler_weight", weights)
        mean("sampler_square", jnp.square(weights))
        largest["sampler_largest_ratio"] = policy_gradient.largest_ratio(old, sampler, valid)
    losses += config.kl_weight * kl
    if entropy := getattr(config, "entropy", 0.0):
        losses -= entropy * scores.entropy
    return Sums(policy_gradient.weighted_sum(losses, weight), means, largest)


def _of_rows(new: jax.Array, old: jax.Array, rows: jax.Array) -> jax.Array:
    """`of_sequence` of tokens `[S]`, where `rows` `[R, S]` says which token is of which row."""
    by_row = policy_gradient.of_sequence(
        jnp.broadcast_to(new, rows.shape), jnp.broadcast_to(old, rows.shape), rows
    )
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
        kl = jnp.where(valid, policy_gradient.kl_k1(targets.old, targets.reference), 0.0)
        rewards = rewards - config.kl * kl
        metrics["kl"] = kl.sum() / number
    discounts = config.gamma, config.lambda_
    advantages, returns = gae(rewards, targets.value, valid, ends, discounts)
    metrics["advantage"] = jnp.abs(advantages).sum() / number
    metrics["explained_variance"] = explained_variance(returns, targets.value, valid)
    if config.whiten:
        advantages = whitened(advantages, valid)
    return targets._replace(advantages=advantages, returns=returns), metrics

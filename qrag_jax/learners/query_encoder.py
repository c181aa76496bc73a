"""GRPO and PPO of a query encoder: states, pools, draws and rewards become ONE update.

The loss depends on the encoder only through the embeddings of states, and that of a state on its
own pool and draw alone. So a state is embedded once: its cotangent is known in the block in which
it is computed (`models.compute.ragged.embed_and_pull_back`). Blocks bound the memory, whatever the
batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.advantages import (
    gae,
    group_advantages,
    mixed_advantages,
    step_advantages,
    varies,
    whitened,
)
from qrag_jax.algorithms.policy_gradient import (
    BNPO,
    Departure,
    aggregation,
    clipped,
    clipped_value_loss,
    departure,
    kl_k1,
    kl_k3,
    only,
    weighted_sum,
)
from qrag_jax.learners.policy_config import GRPOConfig, PPOConfig
from qrag_jax.learners.query_state import Critic, QueryState
from qrag_jax.learners.state import optimizer_step
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.models.compute.ragged import (
    CotangentsOf,
    TokenCount,
    TokenRows,
    embed_and_pull_back,
    embed_rows,
)
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.policies import plackett_luce
from qrag_jax.rollouts.hop_batch import HopBatch
from qrag_jax.runtime.sharding import BATCH_AXES, specs_of, sum_over_data

Metrics = dict[str, jax.Array]
Update = Callable[..., tuple[QueryState, Metrics]]  # (state, HopBatch), then a base if any


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryEncoder:
    """A query encoder, or adapters on a frozen base, and how it learns.

    Attributes:
        shardings: where the training state lives (`query_state.state_shardings`).
        encoder: maps rows of tokens to embeddings.
        blocks: how rows are packed.
        config: GRPO or PPO.
        tau: τ, the policy's temperature.
        weights: of the episode's rewards `[E]` and of a search's rewards `[H]`.
        optimizer, critic_optimizer: of the policy and of PPO's critic.
        schedule: optimizer step → learning rate.
        base_shardings: where the frozen base of adapters lives; None if whole towers are trained.
        is_fresh: the weights that acted are those that learn, so that a batch's first ratio is
            exactly 1.
    """

    mesh: Mesh
    shardings: QueryState
    encoder: TextEncoder
    blocks: Blocks
    config: GRPOConfig | PPOConfig
    tau: float
    weights: tuple[tuple[float, ...], tuple[float, ...]]
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    critic_optimizer: optax.GradientTransformation | None = None
    base_shardings: Params | None = None
    is_fresh: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", self.encoder.on(self.mesh))

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch gives."""
        return self.config.epochs * self.config.minibatches


class _Searches(NamedTuple):
    """What is learned from each search; `[N, T, …]`, or of rows `[R, …]`.

    Attributes:
        pool, present, actions: as in `HopBatch`.
        old: log-probabilities by the weights that acted.
        reference: by the first weights; zeros if nothing needs them.
        advantages: A.
        weight: of the search's loss in the sum; 0: it is not learned from.
        value, returns: PPO's: the value before the update, and what it is regressed on.
    """

    pool: jax.Array
    present: jax.Array
    actions: jax.Array
    old: jax.Array
    reference: jax.Array
    advantages: jax.Array
    weight: jax.Array
    value: jax.Array
    returns: jax.Array


class _Sums(NamedTuple):
    """Totals over searches."""

    loss: jax.Array
    value_loss: jax.Array
    entropy: jax.Array
    gap: jax.Array  # |log π − log π_old| as stored
    departure: Departure
    tokens: TokenCount


def make_update(learner: QueryEncoder) -> Update:
    """Makes the jitted `(state, HopBatch) → (state, metrics)`; the state's buffers are donated.

    With adapters it is `(state, HopBatch, base)`. The batch is split over the mesh; all numbers are
    those of the whole batch on any mesh. Its number of episodes is a multiple of the devices and of
    `members`, and each minibatch is one of the devices.

    An update whose loss or gradient is not finite learns nothing.

    Metrics are float32 scalars: `loss`, `return` (the mean of the weighted rewards), `hops` and
    `advantage` (mean absolute) per scored episode or search, `entropy`, `clip_fraction`, `kl_old`
    and `largest_ratio` to the policy that acted, `replay_gap` (mean difference of log-probabilities
    to the stored ones), `unscored_share` of episodes, `flat_groups` (share of groups without
    different rewards, GRPO), `value_loss`, `explained_variance` and `kl` (PPO), `grad_norm`,
    `learning_rate`, `padding_share`, `env_steps` and `skipped`.
    """
    config, mesh, shardings = learner.config, learner.mesh, learner.shardings
    passes = _Passes(learner)

    def update(state: QueryState, batch: HopBatch, base: Params | None = None):
        rows, searches, metrics = _prepared(passes, state, batch, base)

        def step(state: QueryState, part: tuple[TokenRows, _Searches]):
            weights = aggregation(
                config.aggregation if isinstance(config, GRPOConfig) else BNPO,
                part[0].lengths > 0,
                rows.lengths.shape[1],
            )
            part = part[0], part[1]._replace(weight=weights.each)
            gradients, sums = passes.gradients(state, base, *part)
            state, norm, finite = _applied(learner, state, gradients, weights.divisor, sums)
            return state, (sums, weights.divisor, norm, finite)

        if learner.updates_per_batch == 1:
            state, found = step(state, (rows, searches))
            found = jax.tree.map(lambda leaf: leaf[None], found)
        else:
            order = _order(state, config, len(batch.scored))
            split = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

            def of_minibatch(state: QueryState, places: jax.Array):
                part = jax.tree.map(
                    lambda leaf: jax.lax.with_sharding_constraint(leaf[places], split),
                    (rows, searches),
                )
                return step(state, part)

            state, found = jax.lax.scan(of_minibatch, state, order)
        sums, divisors, norms, finite = found
        actions = jnp.maximum(sums.departure.actions.sum(), 1.0)
        metrics |= {
            "loss": (sums.loss / jnp.maximum(divisors, 1.0)).mean(),
            "entropy": sums.entropy.sum() / actions,
            "clip_fraction": sums.departure.clipped.sum() / actions,
            "kl_old": sums.departure.kl.sum() / actions,
            "largest_ratio": sums.departure.largest.max(),
            "replay_gap": sums.gap[0] / jnp.maximum(sums.departure.actions[0], 1.0),
            "grad_norm": norms.mean(),
            "skipped": 1.0 - finite.astype(jnp.float32).min(),
            "learning_rate": learner.schedule(state.step * learner.updates_per_batch),
            "padding_share": 1.0
            - sums.tokens.real.sum() / jnp.maximum(sums.tokens.computed.sum(), 1.0),
        }
        if isinstance(config, PPOConfig):
            metrics["value_loss"] = sums.value_loss.sum() / actions
        state = state._replace(
            step=state.step + 1,
            env_steps=state.env_steps + (rows.lengths > 0).sum(dtype=jnp.int32),
        )
        return state, metrics | {"env_steps": state.env_steps.astype(jnp.float32)}

    by_episode = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    placed = shardings, by_episode
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=placed
        if learner.base_shardings is None
        else (*placed, learner.base_shardings),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )


def _order(state: QueryState, config: GRPOConfig | PPOConfig, episodes: int) -> jax.Array:
    """The episodes of each minibatch of each epoch, `[epochs · minibatches, episodes of one]`."""
    key = jax.random.fold_in(state.key, state.step)
    keys = jax.random.split(key, config.epochs)
    orders = jax.vmap(lambda each: jax.random.permutation(each, episodes))(keys)
    return orders.reshape(config.epochs * config.minibatches, -1)


def _prepared(
    passes: _Passes, state: QueryState, batch: HopBatch, base: Params | None
) -> tuple[TokenRows, _Searches, Metrics]:
    """The rows that are learned from, all that is known before the first gradient, and metrics."""
    learner = passes.learner
    config, scored = learner.config, batch.scored
    valid = (batch.lengths > 0) & scored[:, None]
    rows = TokenRows(batch.tokens, jnp.where(valid, batch.lengths, 0))
    nothing = jnp.zeros_like(batch.log_probs)
    (old,) = only(valid, batch.log_probs)
    searches = _Searches(
        pool=batch.pool,
        present=batch.present,
        actions=batch.actions,
        old=old,
        reference=nothing,
        advantages=nothing,
        weight=nothing,
        value=nothing,
        returns=nothing,
    )
    of_episode, of_hop = (jnp.asarray(each, jnp.float32) for each in learner.weights)
    totals = jnp.where(scored[:, None], batch.episode_rewards, 0.0) @ of_episode
    by_hop = jnp.where(valid[..., None], batch.hop_rewards, 0.0) @ of_hop
    number = jnp.maximum(valid.sum().astype(jnp.float32), 1.0)
    episodes = jnp.maximum(scored.sum().astype(jnp.float32), 1.0)
    metrics = {
        "return": (totals.sum() + by_hop.sum()) / episodes,
        "hops": number / episodes,
        "unscored_share": 1.0 - scored.astype(jnp.float32).mean(),
    }
    if isinstance(config, GRPOConfig):
        advantages, differs = _group_advantages(config, learner.weights, batch, valid)
        metrics["flat_groups"] = 1.0 - differs.astype(jnp.float32).mean()
        # Of the other groups nothing can be learned, so they are not computed.
        kept = jnp.repeat(differs, config.members)[:, None]
        rows = rows._replace(lengths=jnp.where(kept, rows.lengths, 0))
    if state.reference is not None:
        reference = passes.log_probs(state.reference, base, rows, searches)
        searches = searches._replace(reference=reference)
    if isinstance(config, PPOConfig):
        value = passes.values(state, base, rows)
        last = valid & ~jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
        kl = kl_k1(old, searches.reference) if state.reference is not None else nothing
        rewards = by_hop + jnp.where(last, totals[:, None], 0.0) - config.kl * kl
        advantages, returns = gae(rewards, value, valid, config.gamma, config.lambda_)
        searches = searches._replace(value=value, returns=returns)
        error = jnp.where(valid, returns - value, 0.0)
        mean = returns.sum() / number
        spread = jnp.where(valid, jnp.square(returns - mean), 0.0).sum()
        metrics["explained_variance"] = 1.0 - jnp.square(error).sum() / jnp.maximum(spread, 1e-8)
        metrics["kl"] = jnp.where(valid, kl, 0.0).sum() / number
        if config.whiten:
            advantages = whitened(advantages, valid)
    metrics["advantage"] = jnp.abs(advantages).sum() / number
    return rows, searches._replace(advantages=advantages), metrics


def _group_advantages(
    config: GRPOConfig,
    weights: tuple[tuple[float, ...], tuple[float, ...]],
    batch: HopBatch,
    valid: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Advantages `[N, T]`, and which groups `[N / G]` have different rewards.

    Rewards of episodes are normalised among the members of a group, those of searches among all
    searches of a group and then summed to the end. Each counts by its weight; the sum is normalised
    once more if all are of episodes.
    """
    groups = (-1, config.members)
    scored, hops = batch.scored.reshape(groups), valid.reshape(*groups, valid.shape[1])
    advantages, differs = jnp.zeros(hops.shape, jnp.float32), jnp.zeros(len(scored), bool)
    of_episode, of_hop = weights
    rewards = [batch.episode_rewards[:, i].reshape(groups) for i in range(len(of_episode))]
    if of_episode and not of_hop:
        advantages += mixed_advantages(rewards, of_episode, scored, scaled=config.scaled)[..., None]
    for weight, each in zip(of_episode, rewards, strict=True):
        differs |= varies(each, scored)
        if of_hop:
            advantages += weight * group_advantages(each, scored, scaled=config.scaled)[..., None]
    for i, weight in enumerate(of_hop):
        each = batch.hop_rewards[..., i].reshape(hops.shape)
        advantages += weight * step_advantages(each, hops, scaled=config.scaled)
        differs |= varies(each.reshape(len(hops), -1), hops.reshape(len(hops), -1))
    return jnp.where(hops, advantages, 0.0).reshape(valid.shape), differs


def _applied(
    learner: QueryEncoder,
    state: QueryState,
    gradients: tuple[Params, Critic | None],
    divisor: jax.Array,
    sums: _Sums,
) -> tuple[QueryState, jax.Array, jax.Array]:
    """The state after an optimizer step, the policy's gradient norm, and whether it was finite."""
    divisor = jnp.maximum(divisor, 1.0)
    of_policy, of_critic = jax.tree.map(lambda leaf: leaf / divisor, gradients)
    norm = optax.tree.norm(of_policy)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    if of_critic is not None:
        finite &= jnp.isfinite(optax.tree.norm(of_critic)) & jnp.isfinite(sums.value_loss)
    params, opt_state = optimizer_step(
        state.params, state.opt_state, of_policy, learner.optimizer, finite
    )
    state = state._replace(params=params, opt_state=opt_state)
    if of_critic is not None:
        assert learner.critic_optimizer is not None
        critic, critic_opt_state = optimizer_step(
            state.critic, state.critic_opt_state, of_critic, learner.critic_optimizer, finite
        )
        state = state._replace(critic=critic, critic_opt_state=critic_opt_state)
    return state, norm, finite


class _Passes:
    """Forward and backward passes over the mesh."""

    def __init__(self, learner: QueryEncoder) -> None:
        self.learner = learner
        self._specs = specs_of(learner.shardings)
        self._base_specs = specs_of(learner.base_shardings)

    def gradients(
        self, state: QueryState, base: Params | None, rows: TokenRows, searches: _Searches
    ) -> tuple[tuple[Params, Critic | None], _Sums]:
        """The gradients of the summed losses, and the sums."""
        specs = self._specs

        def on_device(params: Params, critic: Critic | None, base, rows, searches):
            rows, searches = _flat(rows), jax.tree.map(_flattened, searches)
            of_policy, sums = self._policy(params, base, rows, searches)
            of_policy = sum_over_data(of_policy, specs.params)
            of_critic = None
            if critic is not None:
                tower, head, sums = self._critic(critic, base, rows, searches, sums)
                tower = sum_over_data(tower, specs.critic.tower)
                of_critic = Critic(tower, *jax.lax.psum(head, BATCH_AXES))
            largest = jax.lax.pmax(sums.departure.largest, BATCH_AXES)
            sums = jax.lax.psum(sums, BATCH_AXES)
            sums = sums._replace(departure=sums.departure._replace(largest=largest))
            return (of_policy, of_critic), sums

        out = (specs.params, specs.critic), PartitionSpec()
        return self._mapped(on_device, (specs.params, specs.critic), out)(
            state.params, state.critic, base, rows, searches
        )

    def log_probs(
        self, params: Params, base: Params | None, rows: TokenRows, searches: _Searches
    ) -> jax.Array:
        """Log-probabilities `[N, T]` by these parameters."""

        def on_device(params: Params, base, rows, searches):
            embedded = self._embedded(params, base, _flat(rows))
            found = self._log_prob(embedded, jax.tree.map(_flattened, searches))
            return found.reshape(rows.lengths.shape)

        by_episode = PartitionSpec(BATCH_AXES)
        return self._mapped(on_device, (self._specs.params,), by_episode)(
            params, base, rows, searches
        )

    def values(self, state: QueryState, base: Params | None, rows: TokenRows) -> jax.Array:
        """The critic's values `[N, T]`; 0 where there was no search."""

        def on_device(critic: Critic, base, rows, _):
            embedded = self._embedded(critic.tower, base, _flat(rows))
            values = _valued(embedded, critic).reshape(rows.lengths.shape)
            return jnp.where(rows.lengths > 0, values, 0.0)

        by_episode = PartitionSpec(BATCH_AXES)
        return self._mapped(on_device, (self._specs.critic,), by_episode)(
            state.critic, base, rows, rows.lengths
        )

    def _mapped(self, on_device: Callable[..., Any], own: tuple[Any, ...], out: Any) -> Any:
        """Over the mesh: parameters by their own specs, then the base, rows and their values."""
        by_episode = PartitionSpec(BATCH_AXES)
        return jax.shard_map(
            on_device,
            mesh=self.learner.mesh,
            in_specs=(*own, self._base_specs, by_episode, by_episode),
            out_specs=out,
            check_vma=False,
        )

    def _embedded(self, params: Params, base: Params | None, rows: TokenRows) -> jax.Array:
        encoder = self.learner.encoder
        one = encoder.alone(params if base is None else Adapted(base, params))
        return embed_rows(encoder, self.learner.blocks, one, rows)[0]

    def _pulled_back(
        self, params: Params, base: Params | None, rows: TokenRows, cotangents: CotangentsOf
    ) -> tuple[Params, jax.Array, TokenCount]:
        learner = self.learner
        whole = params if base is None else Adapted(base, params)
        return embed_and_pull_back(learner.encoder, learner.blocks, whole, rows, cotangents)

    def _policy(
        self, params: Params, base: Params | None, rows: TokenRows, searches: _Searches
    ) -> tuple[Params, _Sums]:
        def total(embedded: jax.Array, searches: _Searches) -> jax.Array:
            return weighted_sum(self._losses(embedded, searches), searches.weight)

        gradient, embedded, tokens = self._pulled_back(
            params, base, rows, CotangentsOf(jax.grad(total), searches)
        )
        valid = searches.weight > 0
        logits = self._logits(embedded, searches)
        log_prob = plackett_luce.log_prob(logits, searches.actions)
        old = jax.lax.stop_gradient(log_prob) if self._fresh else searches.old
        gap = jnp.where(valid, jnp.abs(log_prob - searches.old), 0.0).sum()
        return gradient, _Sums(
            loss=total(embedded, searches),
            value_loss=jnp.zeros((), jnp.float32),
            entropy=jnp.where(valid, plackett_luce.entropy(logits), 0.0).sum(),
            gap=gap,
            departure=departure(
                log_prob, old, searches.advantages, valid, self.learner.config.clip
            ),
            tokens=tokens,
        )

    def _critic(
        self,
        critic: Critic,
        base: Params | None,
        rows: TokenRows,
        searches: _Searches,
        sums: _Sums,
    ) -> tuple[Params, tuple[jax.Array, jax.Array], _Sums]:
        config = self.learner.config
        assert isinstance(config, PPOConfig)

        def total(embedded: jax.Array, head: tuple[jax.Array, jax.Array], searches: _Searches):
            values = _valued(embedded, Critic(None, *head))
            each = clipped_value_loss(values, searches.value, searches.returns, config.value_clip)
            return weighted_sum(each, searches.weight)

        head = critic.weights, critic.bias

        def cotangents(embedded: jax.Array, searches: _Searches) -> jax.Array:
            return jax.grad(total)(embedded, head, searches)

        gradient, embedded, tokens = self._pulled_back(
            critic.tower, base, rows, CotangentsOf(cotangents, searches)
        )
        loss, of_head = jax.value_and_grad(total, 1)(embedded, head, searches)
        tokens = TokenCount.total([sums.tokens, tokens])
        return gradient, of_head, sums._replace(value_loss=loss, tokens=tokens)

    @property
    def _fresh(self) -> bool:
        return self.learner.is_fresh and self.learner.updates_per_batch == 1

    def _logits(self, embedded: jax.Array, searches: _Searches) -> jax.Array:
        tau = self.learner.tau
        return plackett_luce.pool_logits(embedded, searches.pool, searches.present, tau)

    def _log_prob(self, embedded: jax.Array, searches: _Searches) -> jax.Array:
        return plackett_luce.log_prob(self._logits(embedded, searches), searches.actions)

    def _losses(self, embedded: jax.Array, searches: _Searches) -> jax.Array:
        """The loss of each search, `[R]`."""
        config, logits = self.learner.config, self._logits(embedded, searches)
        log_prob = plackett_luce.log_prob(logits, searches.actions)
        old = jax.lax.stop_gradient(log_prob) if self._fresh else searches.old
        losses = clipped(log_prob, old, searches.advantages, config.clip)
        if isinstance(config, GRPOConfig) and config.beta:
            losses += config.beta * kl_k3(log_prob, searches.reference)
        if config.entropy:
            losses -= config.entropy * plackett_luce.entropy(logits)
        return losses


def _valued(embedded: jax.Array, critic: Critic) -> jax.Array:
    return jnp.einsum("rd,d->r", embedded, critic.weights, precision=EXACT) + critic.bias


def _flat(rows: TokenRows) -> TokenRows:
    """`[N, T, L]` and `[N, T]` → `[N·T, L]` and `[N·T]`."""
    return TokenRows(rows.tokens.reshape(-1, rows.tokens.shape[-1]), rows.lengths.reshape(-1))


def _flattened(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(-1, *leaf.shape[2:])

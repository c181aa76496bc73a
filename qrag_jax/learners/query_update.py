"""GRPO and PPO of a query encoder: states, pools, draws and rewards become ONE update."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.algorithms.advantages import (
    gae,
    group_advantages,
    mixed_advantages,
    step_advantages,
    varies,
    whitened,
)
from qrag_jax.algorithms.policy_gradient import BNPO, aggregation, kl_k1, only
from qrag_jax.learners.policy_config import GRPOConfig, PPOConfig
from qrag_jax.learners.policy_state import Critic, PolicyState
from qrag_jax.learners.query_encoder import Passes, QueryEncoder, Searches, Sums
from qrag_jax.learners.state import optimizer_step
from qrag_jax.models.compute.ragged import TokenRows
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.pool_search import HopBatch
from qrag_jax.runtime.platform import compiler_options
from qrag_jax.runtime.sharding import BATCH_AXES

_ORDER = 2**32 - 2  # of minibatches; not the number of any step

Metrics = dict[str, jax.Array]
Update = Callable[..., tuple[PolicyState, Metrics]]  # (state, HopBatch), then a base if any


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
    passes = Passes(learner)

    def update(state: PolicyState, batch: HopBatch, base: Params | None = None):
        rows, searches, metrics = _prepared(passes, state, batch, base)

        def step(state: PolicyState, part: tuple[TokenRows, Searches]):
            weights = aggregation(
                config.aggregation if isinstance(config, GRPOConfig) else BNPO,
                part[1].weight > 0,
                rows.lengths.shape[1],
            )
            computed = jnp.where(part[0].lengths > 0, weights.each, 0.0)
            part = part[0], part[1]._replace(weight=computed)
            gradients, sums = passes.gradients(state, base, *part)
            state, norm, finite = _applied(learner, state, gradients, weights.divisor, sums)
            return state, (sums, weights.divisor, norm, finite)

        if learner.updates_per_batch == 1:
            state, found = step(state, (rows, searches))
            found = jax.tree.map(lambda leaf: leaf[None], found)
        else:
            order = minibatch_order(state, config, len(batch.scored))
            split = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

            def of_minibatch(state: PolicyState, places: jax.Array):
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
        compiler_options=compiler_options(mesh, adapters=learner.base_shardings is not None),
    )


def minibatch_order(state: PolicyState, config: GRPOConfig | PPOConfig, episodes: int) -> jax.Array:
    """The episodes of each minibatch of each epoch, `[epochs · minibatches, episodes of one]`."""
    # Not the keys of the episodes, which are drawn by the step's number alone.
    stream = jax.random.fold_in(state.key, _ORDER)
    key = jax.random.fold_in(stream, state.step)
    keys = jax.random.split(key, config.epochs)
    orders = jax.vmap(lambda each: jax.random.permutation(each, episodes))(keys)
    return orders.reshape(config.epochs * config.minibatches, -1)


def _prepared(
    passes: Passes, state: PolicyState, batch: HopBatch, base: Params | None
) -> tuple[TokenRows, Searches, Metrics]:
    """The rows that are learned from, all that is known before the first gradient, and metrics."""
    learner = passes.learner
    config, scored = learner.config, batch.scored
    valid = (batch.lengths > 0) & scored[:, None]
    rows = TokenRows(batch.tokens, jnp.where(valid, batch.lengths, 0))
    nothing = jnp.zeros_like(batch.log_probs)
    (old,) = only(valid, batch.log_probs)
    searches = Searches(
        pool=batch.pool,
        present=batch.present,
        actions=batch.actions,
        old=old,
        reference=nothing,
        advantages=nothing,
        weight=valid.astype(jnp.float32),
        value=nothing,
        returns=nothing,
    )
    of_episode, of_hop = (jnp.asarray(each, jnp.float32) for each in learner.weights)
    # Sums, not matrix products: a GPU would round the factors of these.
    totals = (jnp.where(scored[:, None], batch.episode_rewards, 0.0) * of_episode[None]).sum(-1)
    hop_rewards = jnp.where(valid[..., None], batch.hop_rewards, 0.0)
    by_hop = (hop_rewards * of_hop[None, None]).sum(-1)
    number = jnp.maximum(valid.sum().astype(jnp.float32), 1.0)
    episodes = jnp.maximum(scored.sum().astype(jnp.float32), 1.0)
    metrics = {
        "return": (totals.sum() + by_hop.sum()) / episodes,
        "hops": number / episodes,
        "unscored_share": 1.0 - scored.astype(jnp.float32).mean(),
    }
    if isinstance(config, GRPOConfig):
        advantages, differs = _group_advantages(config, learner.weights, batch, valid)
        metrics["flat_groups"] = (~differs).astype(jnp.float32).mean()
        if not (config.beta or config.entropy):
            # The gradient of the other groups is 0: they count in divisors, but are not computed.
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
    state: PolicyState,
    gradients: tuple[Params, Critic | None],
    divisor: jax.Array,
    sums: Sums,
) -> tuple[PolicyState, jax.Array, jax.Array]:
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

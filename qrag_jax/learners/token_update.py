"""GRPO, PPO and imitation of a token policy: sampled tokens and rewards become ONE update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.advantages import best_of_groups, group_advantages
from qrag_jax.algorithms.policy_gradient import (
    BNPO,
    aggregation,
    clipped_value_loss,
    correction,
    weighted_sum,
)
from qrag_jax.learners.action_loss import (
    PerAction,
    Sums,
    action_losses,
    departure_metrics,
    learn_actions,
    ppo_actions,
    summed,
)
from qrag_jax.learners.config import BEST, REWARD, SFTConfig, TokenGRPOConfig, TokenPPOConfig
from qrag_jax.learners.state import Critic, TrainState
from qrag_jax.learners.token_policy import ROW_AXES, BlockPasses, TokenPolicy, token_count
from qrag_jax.learners.update import Metrics, Update, counted, in_steps, step_metrics
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.models.trunks.transformer import Params
from qrag_jax.policies.tokens import TokenScores
from qrag_jax.rollouts.token_blocks import BlockShape, TokenBlocks, token_blocks
from qrag_jax.rollouts.trajectories import TokenBatch


class TokenEpisodes(NamedTuple):
    """What an update takes.

    Attributes:
        blocks: rows of tokens, `[M, B, …]` for M minibatches; split over the devices along B.
        rewards: float32 `[N, K]`; of GRPO, groups of neighbours.
        scored: bool `[N]`.
        counts: float32 `[N]`, tokens of each episode that are learned from.
        differs: bool `[N]`, whether the rewards of its group differ; else its advantage is 0.
        ends: of PPO: bool `[M, B, S]`, the last token of each episode that is learned from.
    """

    blocks: TokenBlocks
    rewards: jax.Array
    scored: jax.Array
    counts: jax.Array
    differs: jax.Array
    ends: jax.Array | None


def token_episodes(policy: TokenPolicy, batch: TokenBatch, shape: BlockShape) -> TokenEpisodes:
    """The episodes of a batch that something can be learned from, in blocks.

    A group of GRPO's whose scored members do not differ counts in the divisor. Its gradient is 0
    without a KL, so then nothing of it is computed. Minibatches of PPO are neighbouring episodes,
    as many in each; whoever makes batches shuffles them.

    Raises:
        ValueError: the minibatches do not divide the episodes, or an episode that PPO learns from
            has two rows, whose tokens would have no common order.
    """
    config, learned, number = policy.config, batch.loss_mask, len(batch.scored)
    counts = np.bincount(batch.episode, learned.sum(axis=1), number + 1)[:-1]
    differs = np.ones(number, bool)
    if isinstance(config, TokenGRPOConfig):
        totals = batch.rewards @ np.asarray(policy.weights, np.float32)
        groups = (-1, config.members)
        differs = _differs(totals.reshape(groups), batch.scored.reshape(groups))
        differs = np.repeat(differs, config.members)
        counts = np.where(batch.scored, counts, 0.0)
        computed = batch.scored if config.beta else batch.scored & differs
        learned = learned & np.append(computed, False)[batch.episode][:, None]
    is_row = np.asarray(learned.any(axis=1))
    if isinstance(config, TokenPPOConfig):
        if number % config.minibatches:
            raise ValueError(f"{number} episodes are no {config.minibatches} equal minibatches")
        rows = np.bincount(batch.episode, is_row, number + 1)[:-1]
        if rows.max(initial=0) > 1:
            raise ValueError(f"episode {rows.argmax()} has {rows.max():.0f} rows; PPO's have one")
        part = batch.episode // (number // config.minibatches)
        parts = [is_row & (part == each) for each in range(config.minibatches)]
    else:
        parts = [is_row]
    batches = [
        batch._replace(loss_mask=learned, log_prob_mask=batch.log_prob_mask & rows[:, None])
        for rows in parts
    ]
    found = token_blocks(batches, shape, policy.row_devices)
    blocks: Any = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    ends = _ends(blocks) if isinstance(config, TokenPPOConfig) else None
    rewards, counts = batch.rewards.astype(np.float32), counts.astype(np.float32)
    targets: Any = rewards, batch.scored, counts, differs, ends
    return TokenEpisodes(blocks, *targets)


def _differs(rewards: np.ndarray, scored: np.ndarray) -> np.ndarray:
    low = np.where(scored, rewards, np.inf).min(axis=1)
    high = np.where(scored, rewards, -np.inf).max(axis=1)
    return scored.any(axis=1) & (high > low)


def _ends(blocks: TokenBlocks) -> np.ndarray:
    """The last learned token of each row; those of a row lie one after the other."""
    learned, row = np.asarray(blocks.learned), np.asarray(blocks.row)
    ends = np.zeros(learned.shape, bool)
    for place in np.ndindex(learned.shape[:-1]):
        at = np.flatnonzero(learned[place])
        of = row[place][at]
        is_last = np.append(of[1:] != of[:-1], True)[: len(at)]
        ends[place][at[is_last]] = True
    return ends


def episode_shardings(mesh: Mesh) -> Any:
    """Where the episodes of an update live: a `TokenEpisodes` of a sharding for each field."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    by_block: Any = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))
    return TokenEpisodes(by_block, replicated, replicated, replicated, replicated, by_block)


# ------------------------------------------------------------------------ losses


def action_loss(
    config: SFTConfig | TokenGRPOConfig | TokenPPOConfig,
    scores: TokenScores,
    block: TokenBlocks,
    targets: PerAction,
) -> tuple[jax.Array, Sums]:
    """The loss of a block's sampled tokens; see `token_policy.BlockLoss`."""
    rows = jnp.arange(len(block.lengths))[:, None] == block.row[None]
    # If a batch gives one step, its tokens are of the policy that learns.
    fresh, sampler = config.updates_per_batch == 1, block.sampler
    losses = action_losses(config, scores, targets, is_fresh=fresh, sampler=sampler, rows=rows)
    cap = getattr(config, "sampler_cap", 1.0)
    apart = correction(losses.old, sampler, targets.weight > 0, cap)
    sums = summed(config, losses, scores, targets, tokens=token_count(block), correction=apart)
    return sums.loss, sums


def value_loss(
    most: float, values: jax.Array, block: TokenBlocks, targets: PerAction
) -> tuple[jax.Array, tuple[jax.Array, TokenCount]]:
    """The clipped squared error of each value, at most so far from that before the update."""
    each = clipped_value_loss(values, targets.value, targets.returns, most)
    loss = weighted_sum(each, targets.weight)
    return loss, (loss, token_count(block))


# ------------------------------------------------------------------------ update


def make_token_update(policy: TokenPolicy) -> Update:
    """Makes the jitted `(state, TokenEpisodes) → (state, metrics)`; the state is donated.

    With adapters it is `(state, TokenEpisodes, base)`. All numbers are those of the whole batch on
    any mesh and in any blocks; log-probabilities, values and advantages are those before its first
    step. A step whose loss or gradient is not finite learns nothing. Before update
    `policy.rests_until` the critic alone learns.

    Metrics are float32 scalars: `loss`, `entropy` (NaN where nothing is learned from), `grad_norm`,
    `learning_rate`, `padding_share`, `tokens` (sampled ones that are learned from), `skipped` and
    `env_steps`. By rewards also `return`, `advantage` (mean
    absolute, before PPO whitens), `unscored_share` of episodes, `clip_fraction`, `kl_old`, `kl` to
    the reference in nats a token, and of the sampler `sampler_kl`, `sampler_largest_ratio`,
    `sampler_truncated` (share of tokens) and `sampler_effective` (effective sample size as a share
    of tokens). Of GRPO `flat_groups`; of PPO `value_loss`, `critic_grad_norm`, `largest_ratio` and
    `explained_variance` of the returns.
    """
    config, passes = policy.config, _passes(policy)
    by_rewards, is_ppo = not isinstance(config, SFTConfig), isinstance(config, TokenPPOConfig)
    steps, minibatches = config.updates_per_batch, getattr(config, "minibatches", 1)

    def update(state: TrainState, episodes: TokenEpisodes, base: Params | None = None):
        targets, divisors, metrics = _prepared(policy, passes, state, episodes, base)
        # Imitation and GRPO have no warm-up: a condition less, or compilers would round otherwise.
        awake = state.step >= policy.rests_until if is_ppo else True

        def step(state: TrainState, number: jax.Array | None):
            at = 0 if number is None else number
            every = episodes.blocks, targets, divisors
            *part, divisor = jax.tree.map(lambda leaf: leaf[at], every)
            return learn_actions(policy, passes, state, base, *part, divisor=divisor, awake=awake)

        order = None if steps == 1 else jnp.tile(jnp.arange(minibatches), config.epochs)
        state, result = in_steps(step, state, order)
        losses = result.sums.loss / result.divisor
        first = jax.tree.map(lambda leaf: leaf[:minibatches], result.sums)
        # Where each step sees the whole batch: the loss before the first, how far the last went.
        shown = result if is_ppo else jax.tree.map(lambda leaf: leaf[-1:], result)
        actions = first.departure.actions.sum()
        tokens, rate = jnp.maximum(actions, 1.0), policy.schedule(state.step * steps)
        metrics |= step_metrics(result.step._replace(norm=shown.step.norm), rate, result.tokens) | {
            "loss": losses.mean() if is_ppo else losses[0],
            # NaN, which means leave out, where nothing is learned from: 0 would tell of certainty.
            "entropy": first.entropy.sum() / actions,
            "tokens": actions,
        }
        if by_rewards:
            departed = departure_metrics(shown.sums)
            apart = jax.tree.map(lambda leaf: leaf.sum(), first.correction)
            metrics |= {
                "kl": metrics.get("kl", first.reference_kl.sum() / tokens),
                "clip_fraction": departed["clip_fraction"],
                "kl_old": departed["kl_old"],
                "sampler_kl": apart.kl / tokens,
                "sampler_largest_ratio": first.correction.largest.max(),
                "sampler_truncated": apart.truncated / tokens,
                "sampler_effective": apart.effective_share(),
            }
        if is_ppo:
            metrics |= {
                "largest_ratio": departed["largest_ratio"],
                "value_loss": (result.value_loss / result.divisor).mean(),
                "critic_grad_norm": result.step.critic_norm.mean(),
            }
        return counted(state, actions, metrics)

    return policy.update(update, episode_shardings(policy.mesh))


Passes = tuple[BlockPasses, BlockPasses | None]  # of policy and critic


def _passes(policy: TokenPolicy) -> Passes:
    config, of_critic = policy.config, policy.shardings.critic
    of_policy = BlockPasses(policy, partial(action_loss, config))
    if not isinstance(config, TokenPPOConfig) or of_critic is None:
        return of_policy, None
    loss = partial(value_loss, config.value_clip)
    return of_policy, BlockPasses(policy, loss)


def _prepared(
    policy: TokenPolicy,
    passes: Passes,
    state: TrainState,
    episodes: TokenEpisodes,
    base: Params | None,
) -> tuple[PerAction, jax.Array, Metrics]:
    """What each token is learned with `[M, B, S]`, what sums of each minibatch are divided by, and
    metrics of the rewards."""
    (of_policy, of_critic), blocks = passes, episodes.blocks
    config = policy.config
    nothing = jnp.zeros(blocks.target.shape, jnp.float32)

    def each(read: Callable[[TokenBlocks], jax.Array]) -> jax.Array:
        if len(nothing) == 1:
            return read(jax.tree.map(lambda leaf: leaf[0], blocks))[None]
        return jax.lax.map(read, blocks)

    old = reference = value = nothing
    kl_in_reward = isinstance(config, TokenPPOConfig) and config.kl_in == REWARD and config.kl
    if kl_in_reward or getattr(config, "kl_weight", 0.0):
        # Adapters begin at the base or at the stage's own: then these are the reference.
        assert state.reference is not None
        reference = each(lambda b: of_policy.read(Critic(state.reference), base, b))
    if config.updates_per_batch > 1 or kl_in_reward:
        old = each(lambda b: of_policy.read(Critic(state.params), base, b))
    if of_critic is not None:
        critic: Any = state.critic
        value = each(lambda b: of_critic.read(critic, base, b))
    targets = PerAction(old, reference, nothing, nothing, value, nothing)
    if isinstance(config, TokenPPOConfig):
        return ppo_tokens(policy, episodes, targets)
    return grpo_tokens(policy, episodes, targets)


def grpo_tokens(
    policy: TokenPolicy, episodes: TokenEpisodes, targets: PerAction
) -> tuple[PerAction, jax.Array, Metrics]:
    """Advantages and weights of GRPO or of imitation, divisors `[1]`, and metrics of rewards."""
    config, blocks = policy.config, episodes.blocks
    counts, differs = jnp.asarray(episodes.counts), jnp.asarray(episodes.differs)
    metrics: Metrics = {}
    advantages = jnp.ones(len(counts), jnp.float32)
    each, divisor = aggregation(BNPO, counts, 0)
    if isinstance(config, TokenGRPOConfig):
        each, divisor = aggregation(config.aggregation, counts, config.longest)
        groups = (-1, config.members)
        totals, metrics = _totals(policy, episodes)
        by_group = totals.reshape(groups), jnp.asarray(episodes.scored).reshape(groups)
        if config.learned == BEST:
            advantages = best_of_groups(*by_group)
        else:
            advantages = group_advantages(*by_group, scaled=config.scaled)
        advantages = jnp.where(differs, advantages.reshape(-1), 0.0)
        present = jnp.maximum(by_group[1].sum().astype(jnp.float32), 1.0)
        metrics["advantage"] = jnp.abs(advantages).sum() / present
        metrics["flat_groups"] = (~differs).astype(jnp.float32).mean()
    of_episode = jnp.minimum(blocks.episode, len(counts) - 1)
    learned = blocks.learned & (blocks.episode < len(counts))
    targets = targets._replace(
        advantages=jnp.where(learned, advantages[of_episode], 0.0),
        weight=jnp.where(learned, each[of_episode], 0.0),
    )
    return targets, jnp.maximum(divisor, 1.0)[None], metrics


def ppo_tokens(
    policy: TokenPolicy[TokenPPOConfig], episodes: TokenEpisodes, targets: PerAction
) -> tuple[PerAction, jax.Array, Metrics]:
    """PPO's advantages and returns of given values, divisors `[M]`, and metrics of rewards."""
    config, blocks, scored = policy.config, episodes.blocks, jnp.asarray(episodes.scored)
    ends = jnp.asarray(episodes.ends)
    valid = blocks.learned & (blocks.episode < len(scored))
    totals, metrics = _totals(policy, episodes)
    of_episode = totals[jnp.minimum(blocks.episode, len(scored) - 1)]
    by_token = jnp.where(ends & valid, of_episode, 0.0)
    targets, of_advantages = ppo_actions(config, by_token, targets, valid, ends)
    weight = valid.astype(jnp.float32)
    return (
        targets._replace(weight=weight),
        jnp.maximum(weight.sum(axis=(1, 2)), 1.0),
        metrics | of_advantages,
    )


def _totals(policy: TokenPolicy, episodes: TokenEpisodes) -> tuple[jax.Array, Metrics]:
    """The weighted rewards `[N]`, 0 where there are none, and metrics of them."""
    rewards, scored = jnp.asarray(episodes.rewards), jnp.asarray(episodes.scored)
    weights = jnp.asarray(policy.weights, jnp.float32)
    # A sum, not a matrix product: a GPU would round the factors of that.
    totals = jnp.where(scored, (rewards * weights[None]).sum(axis=1), 0.0)
    present = jnp.maximum(scored.sum().astype(jnp.float32), 1.0)
    return totals, {
        "return": totals.sum() / present,
        "unscored_share": 1.0 - scored.astype(jnp.float32).mean(),
    }

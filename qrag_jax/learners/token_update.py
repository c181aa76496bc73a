"""GRPO, PPO and imitation of a token policy: sampled tokens and rewards become ONE update.

So do pairs of rows with a common prompt, by IPO and DPO.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.advantages import best_of_groups, group_advantages, varies
from qrag_jax.algorithms.policy_gradient import BNPO, aggregation, effective_share
from qrag_jax.learners.config import (
    BEST,
    REWARD,
    PreferenceConfig,
    SFTConfig,
    TokenGRPOConfig,
    TokenPPOConfig,
)
from qrag_jax.learners.policy import PerAction, ppo_actions
from qrag_jax.learners.state import Critic, TrainState
from qrag_jax.learners.token_policy import ROW_AXES, TokenPolicy
from qrag_jax.learners.update import REPLICATED, Metrics, Update, counted
from qrag_jax.models.trunks.transformer import Params
from qrag_jax.rollouts.token_blocks import BlockShape, TokenBlocks, token_blocks
from qrag_jax.rollouts.trajectories import TokenBatch
from qrag_jax.runtime.mesh import put_whole

MEMBERS = 2  # rows of a pair: the winner, then the loser


class TokenEpisodes(NamedTuple):
    """What an update takes: episodes with rewards, or pairs of a better and a worse row."""

    # Rows of tokens, `[M, B, …]` for M minibatches; split over the devices along B. Of pairs M is
    # 1, and a group is a pair
    blocks: TokenBlocks
    rewards: Any = None  # float32 `[N]`; of GRPO, groups of neighbours
    scored: Any = None  # bool `[N]`
    counts: Any = None  # float32 `[N]`, tokens of each episode that are learned from
    ends: Any = None  # of PPO: bool `[M, B, S]`, the last learned token of each episode
    # Of pairs, float32: log-probabilities of winner and loser by the reference `[1, B, Q, 2]`; and
    # the weight `[1, B, Q]`, 1, or 0 where there is no pair
    pairs: Any = None


def episode_shardings(mesh: Mesh) -> Any:
    """Where the episodes of an update live: a `TokenEpisodes` of a sharding for each field."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    by_block: Any = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))
    return TokenEpisodes(by_block, replicated, replicated, replicated, by_block, by_block)


def token_episodes(policy: TokenPolicy, batch: TokenBatch, shape: BlockShape) -> TokenEpisodes:
    """The episodes of a batch that something can be learned from, in blocks.

    The parts of an episode's reward are added. A group of GRPO's whose scored members do not differ
    counts in the divisor. Its gradient is 0 without a KL, so then nothing of it is computed.
    Minibatches of PPO are neighbouring episodes, as many in each; whoever makes batches shuffles
    them. An episode that PPO learns from has one row: tokens of two would have no common order.
    """
    config, learned, number = policy.config, batch.loss_mask, len(batch.scored)
    counts = np.bincount(batch.episode, learned.sum(axis=1), number + 1)[:-1]
    rewards = batch.rewards.sum(axis=1, dtype=np.float32)
    if isinstance(config, TokenGRPOConfig):
        counts, computed = np.where(batch.scored, counts, 0.0), batch.scored
        if not config.beta:
            groups = (-1, config.members)
            differs: Any = varies(rewards.reshape(groups), batch.scored.reshape(groups))
            computed = computed & np.repeat(differs, config.members)
        learned = learned & np.append(computed, False)[batch.episode][:, None]
    is_row = np.asarray(learned.any(axis=1))
    if isinstance(config, TokenPPOConfig):
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
    targets: Any = rewards, batch.scored, counts.astype(np.float32), ends
    return TokenEpisodes(blocks, *targets)


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


def pair_episodes(
    policy: TokenPolicy[PreferenceConfig],
    batch: TokenBatch,
    shape: BlockShape,
    reference: np.ndarray,
) -> TokenEpisodes:
    """The pairs of a batch that something can be learned from, in blocks; none is cut.

    A pair with a row of which no token is learned from is left out before anything is computed.

    Args:
        batch: pair g is group g, the episodes 2g, its winner, and 2g + 1, its loser, of one row
            each.
        shape: of groups of `MEMBERS`; `choose_shape(…, whole=True)` makes one with room for every
            pair.
        reference: float32 `[N]`, log-probability of each episode by the reference, of the same
            tokens and summed or averaged as the config says (`row_log_probs`).
    """
    number = len(batch.scored)
    rows = np.bincount(batch.episode, batch.loss_mask.any(axis=1), number + 1)[:-1]
    kept = (rows.reshape(-1, MEMBERS) > 0).all(axis=1)
    learned = batch.loss_mask & np.append(np.repeat(kept, MEMBERS), False)[batch.episode][:, None]
    batch = batch._replace(loss_mask=learned, log_prob_mask=learned)
    (blocks,) = token_blocks([batch], shape, policy.row_devices, whole=True)
    # The pair of each group of each block; the last one is none.
    pair = np.full(np.shape(blocks.shared), number // MEMBERS)
    block, token = np.nonzero(blocks.valid)
    group = np.asarray(blocks.row)[block, token] // MEMBERS
    pair[block, group] = np.asarray(blocks.episode)[block, token] // MEMBERS
    of_none = np.zeros((1, MEMBERS), np.float32)
    by_pair = np.concatenate([np.asarray(reference, np.float32).reshape(-1, MEMBERS), of_none])
    pairs = by_pair[pair], np.append(kept, False).astype(np.float32)[pair]
    blocks, pairs = jax.tree.map(lambda leaf: leaf[None], (blocks, pairs))
    return TokenEpisodes(blocks, pairs=pairs)


# ------------------------------------------------------------------------ update


def make_token_update(policy: TokenPolicy) -> Update:
    """The program `(state, TokenEpisodes) → (state, metrics)`; see `Learner.update`.

    All numbers are those of the whole batch on any mesh and in any blocks; log-probabilities,
    values and advantages are those before its first step. Before update `policy.rests_until` the
    critic alone learns.

    Metrics besides those of `learn_in_steps`: `tokens` (sampled ones that are learned from). By
    rewards also `return`, `advantage` (mean absolute, before PPO whitens), `unscored_share` of
    episodes, `kl` to the reference in nats a token, and of the sampler `sampler_kl`,
    `sampler_largest_ratio`, `sampler_truncated` (share of tokens) and `sampler_effective`
    (effective sample size as a share of tokens). Of GRPO `flat_groups`; of PPO
    `explained_variance` of the returns. Of pairs `pairs` (their number) and, as means over those
    that are learned from, `margin` (h in nats), `accuracy` (h is above 0), `log_prob_winner` and
    `log_prob_loser` (of sequences as the config has them).
    """
    config = policy.config
    minibatches, epochs = (getattr(config, name, 1) for name in ("minibatches", "epochs"))
    is_ppo = isinstance(config, TokenPPOConfig)
    order = np.tile(np.arange(minibatches), epochs)

    def update(state: TrainState, episodes: TokenEpisodes, base: Params | None = None):
        targets: Any
        if isinstance(config, PreferenceConfig):
            targets, pairs = episodes.pairs, episodes.pairs[1].sum()
            divisors, metrics = jnp.maximum(pairs, 1.0)[None], {"pairs": pairs}
            is_learned = episodes.blocks.learned
        else:
            targets, divisors, metrics = _prepared(policy, state, episodes, base)
            is_learned = targets.weight > 0
        # Only PPO has a warm-up: a condition less, or compilers would round otherwise.
        awake = state.step >= policy.rests_until if is_ppo else True

        def part_of(number: jax.Array) -> tuple[TokenBlocks, Any]:
            return jax.tree.map(lambda leaf: leaf[number], (episodes.blocks, targets))

        state, learned = policy.learn_in_steps(
            state, base, part_of, order, divisors[order], one_pass=minibatches, awake=awake
        )
        actions = is_learned.sum().astype(jnp.float32)
        metrics = learned | {"tokens": actions} | metrics
        if "entropy" in metrics:
            # NaN, which means leave out, where nothing is learned from: 0 would tell of certainty.
            metrics["entropy"] = jnp.where(actions > 0, metrics["entropy"], jnp.nan)
        if "sampler_weight" in metrics:
            weights = metrics.pop("sampler_weight"), metrics.pop("sampler_square")
            metrics["sampler_effective"] = effective_share(*weights)
        if isinstance(config, TokenGRPOConfig):
            del metrics["largest_ratio"]
        return counted(state, actions, metrics)

    return policy.update(update, episode_shardings(policy.mesh))


def _prepared(
    policy: TokenPolicy, state: TrainState, episodes: TokenEpisodes, base: Params | None
) -> tuple[PerAction, jax.Array, Metrics]:
    """What each token is learned with `[M, B, S]`, what sums of each minibatch are divided by, and
    metrics of the rewards."""
    config, blocks = policy.config, episodes.blocks
    nothing = jnp.zeros(blocks.target.shape, jnp.float32)

    def read(by: Any) -> jax.Array:
        """By a policy or a critic."""
        if len(nothing) == 1:
            return policy.read(by, base, jax.tree.map(lambda leaf: leaf[0], blocks))[None]
        return jax.lax.map(partial(policy.read, by, base), blocks)

    old = reference = value = nothing
    kl_in_reward = isinstance(config, TokenPPOConfig) and config.kl_in == REWARD and config.kl
    if kl_in_reward or getattr(config, "kl_weight", 0.0):
        # Adapters begin at the base or at the stage's own: then these are the reference.
        reference = read(Critic(state.reference))
    if config.updates_per_batch > 1 or kl_in_reward:
        old = read(Critic(state.params))
    if isinstance(config, TokenPPOConfig) and state.critic is not None:
        value = read(state.critic)
    targets = PerAction(old, reference, nothing, nothing, value, nothing)
    if isinstance(config, TokenPPOConfig):
        return ppo_tokens(config, episodes, targets)
    return grpo_tokens(config, episodes, targets)


def grpo_tokens(
    config: SFTConfig | TokenGRPOConfig, episodes: TokenEpisodes, targets: PerAction
) -> tuple[PerAction, jax.Array, Metrics]:
    """Advantages and weights of GRPO or of imitation, divisors `[1]`, and metrics of rewards."""
    blocks, counts = episodes.blocks, jnp.asarray(episodes.counts)
    metrics: Metrics = {}
    advantages = jnp.ones(len(counts), jnp.float32)
    each, divisor = aggregation(BNPO, counts, 0)
    if isinstance(config, TokenGRPOConfig):
        each, divisor = aggregation(config.aggregation, counts, config.longest)
        groups = (-1, config.members)
        rewards, metrics = _rewards(episodes)
        by_group = rewards.reshape(groups), jnp.asarray(episodes.scored).reshape(groups)
        if config.learned == BEST:
            advantages = best_of_groups(*by_group)
        else:
            advantages = group_advantages(*by_group, scaled=config.scaled)
        advantages = advantages.reshape(-1)
        present = jnp.maximum(by_group[1].sum().astype(jnp.float32), 1.0)
        metrics["advantage"] = jnp.abs(advantages).sum() / present
        metrics["flat_groups"] = (~varies(*by_group)).astype(jnp.float32).mean()
    of_episode = jnp.minimum(blocks.episode, len(counts) - 1)
    learned = blocks.learned & (blocks.episode < len(counts))
    targets = targets._replace(
        advantages=jnp.where(learned, advantages[of_episode], 0.0),
        weight=jnp.where(learned, each[of_episode], 0.0),
    )
    return targets, jnp.maximum(divisor, 1.0)[None], metrics


def ppo_tokens(
    config: TokenPPOConfig, episodes: TokenEpisodes, targets: PerAction
) -> tuple[PerAction, jax.Array, Metrics]:
    """PPO's advantages and returns of given values, divisors `[M]`, and metrics of rewards."""
    blocks, scored = episodes.blocks, jnp.asarray(episodes.scored)
    ends = jnp.asarray(episodes.ends)
    valid = blocks.learned & (blocks.episode < len(scored))
    rewards, metrics = _rewards(episodes)
    of_episode = rewards[jnp.minimum(blocks.episode, len(scored) - 1)]
    by_token = jnp.where(ends & valid, of_episode, 0.0)
    targets, of_advantages = ppo_actions(config, by_token, targets, valid, ends)
    weight = valid.astype(jnp.float32)
    return (
        targets._replace(weight=weight),
        jnp.maximum(weight.sum(axis=(1, 2)), 1.0),
        metrics | of_advantages,
    )


def _rewards(episodes: TokenEpisodes) -> tuple[jax.Array, Metrics]:
    """The rewards `[N]`, 0 where there are none, and metrics of them."""
    scored = jnp.asarray(episodes.scored)
    rewards = jnp.where(scored, jnp.asarray(episodes.rewards), 0.0)
    present = jnp.maximum(scored.sum().astype(jnp.float32), 1.0)
    return rewards, {
        "return": rewards.sum() / present,
        "unscored_share": 1.0 - scored.astype(jnp.float32).mean(),
    }


# ------------------------------------------------------------------------ reference of pairs

RowLogProbs = Callable[..., np.ndarray]  # (params, TokenBatch, BlockShape), then a base if any


def row_log_probs(policy: TokenPolicy[PreferenceConfig]) -> RowLogProbs:
    """Makes `(params, TokenBatch, BlockShape) → float32 [N]`, the log-probability of each episode.

    It is of the tokens that are learned from, summed or averaged as the config says; 0 if there are
    none. By the parameters that a stage begins with it is what `pair_episodes` takes as the
    reference. With adapters it is `(params, TokenBatch, BlockShape, base)`. Rows need be no pairs.
    """
    of_blocks = policy.on_mesh(PartitionSpec(ROW_AXES))

    def log_probs(params: Params, blocks: TokenBlocks, base: Params | None = None) -> jax.Array:
        return policy.read(Critic(params), base, blocks)

    placed = policy.shardings.params, of_blocks
    program = policy.program(log_probs, placed, policy.on_mesh(REPLICATED))

    def of_rows(params: Params, batch: TokenBatch, shape: BlockShape, *base: Params) -> np.ndarray:
        batch = batch._replace(log_prob_mask=batch.loss_mask)
        (blocks,) = token_blocks([batch], shape, policy.row_devices)
        found = np.asarray(program(params, put_whole(blocks, of_blocks), *base))
        found = found[blocks.valid]
        episode, number = blocks.episode[blocks.valid], len(batch.scored)
        total: np.ndarray = np.bincount(episode, found, number)
        if policy.config.averaged:
            total = total / np.maximum(np.bincount(episode, minlength=number), 1)
        return total.astype(np.float32)

    return of_rows

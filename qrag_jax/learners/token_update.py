"""GRPO and imitation of a token policy: blocks of sampled tokens and rewards become ONE update."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.advantages import best_of_groups, group_advantages
from qrag_jax.algorithms.policy_gradient import BNPO, DAPO, DR_GRPO, GRPO
from qrag_jax.learners.policy_state import PolicyState
from qrag_jax.learners.token_config import BEST, SFTConfig, TokenGRPOConfig
from qrag_jax.learners.token_losses import PerToken
from qrag_jax.learners.token_policy import (
    ROW_AXES,
    Metrics,
    TokenPasses,
    TokenPolicy,
    Update,
    counted,
    jitted,
    learn,
)
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.token_blocks import BlockShape, TokenBlocks, token_blocks
from qrag_jax.rollouts.trajectories import TokenBatch


class TokenEpisodes(NamedTuple):
    """What an update takes.

    Attributes:
        blocks: rows of tokens; their leaves are split over the devices.
        counts: float32 `[N]`, tokens of each episode that are learned from.
        rewards: float32 `[N, K]`, groups of neighbours.
        scored: bool `[N]`.
        differs: bool `[N]`, whether its group's rewards differ; else its advantage is 0.
    """

    blocks: TokenBlocks
    counts: jax.Array
    rewards: jax.Array
    scored: jax.Array
    differs: jax.Array


def token_episodes(
    policy: TokenPolicy, batch: TokenBatch, shape: BlockShape, *, differ_by: int | None = None
) -> TokenEpisodes:
    """The scored episodes of a batch, in blocks.

    A group whose scored members do not differ counts in the divisor. Its gradient is 0 without a
    KL, so then nothing of it is computed.

    Args:
        differ_by: the part of the reward that must differ within a group; None: the weighted sum.
    """
    config, learned, differs = policy.config, batch.loss_mask, np.ones(len(batch.scored), bool)
    counts = np.bincount(batch.episode, learned.sum(axis=1), len(batch.scored) + 1)[:-1]
    if isinstance(config, TokenGRPOConfig):
        totals = batch.rewards @ np.asarray(policy.weights, np.float32)
        of_groups = totals if differ_by is None else batch.rewards[:, differ_by]
        groups = (-1, config.members)
        differs = _differs(of_groups.reshape(groups), batch.scored.reshape(groups))
        differs = np.repeat(differs, config.members)
        counts = np.where(batch.scored, counts, 0.0)
        computed = batch.scored if config.beta else batch.scored & differs
        learned = learned & np.append(computed, False)[batch.episode][:, None]
    is_row = np.asarray(learned.any(axis=1))
    batch = batch._replace(loss_mask=learned, log_prob_mask=batch.log_prob_mask & is_row[:, None])
    given: Any = counts.astype(np.float32), batch.rewards.astype(np.float32), batch.scored, differs
    return TokenEpisodes(token_blocks(batch, shape, policy.row_devices), *given)


def _differs(rewards: np.ndarray, scored: np.ndarray) -> np.ndarray:
    low = np.where(scored, rewards, np.inf).min(axis=1)
    high = np.where(scored, rewards, -np.inf).max(axis=1)
    return scored.any(axis=1) & (high > low)


def episode_shardings(mesh: Mesh) -> Any:
    """Where the episodes of an update live: a `TokenEpisodes` of a sharding for each field."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    by_block: Any = NamedSharding(mesh, PartitionSpec(ROW_AXES))
    return TokenEpisodes(by_block, replicated, replicated, replicated, replicated)


def make_token_update(policy: TokenPolicy) -> Update:
    """Makes the jitted `(state, TokenEpisodes) → (state, metrics)`; the state is donated.

    With adapters it is `(state, TokenEpisodes, base)`. All numbers are those of the whole batch on
    any mesh and in any blocks. An update whose loss or gradient is not finite learns nothing.

    Metrics are float32 scalars: `loss`, `entropy` (NaN where nothing is learned from), `grad_norm`,
    `learning_rate`, `padding_share`, `tokens` (sampled ones that are learned from), `skipped` and
    `env_steps`; of GRPO also `return`, `advantage` (mean absolute), `unscored_share` of episodes,
    `flat_groups`, `clip_fraction`, `kl_old`, `kl` to the reference, and of the sampler
    `sampler_kl`, `sampler_largest_ratio`, `sampler_truncated` (share of tokens) and
    `sampler_effective` (effective sample size as a share of tokens).
    """
    config, passes = policy.config, TokenPasses(policy)

    def update(state: PolicyState, episodes: TokenEpisodes, base: Params | None = None):
        given, divisor, metrics = given_tokens(policy, episodes)
        blocks = episodes.blocks
        if isinstance(config, TokenGRPOConfig) and config.beta:
            # Adapters begin at the base or at the stage's own: then these are the reference.
            assert state.reference is not None
            given = given._replace(reference=passes.log_probs(state.reference, base, blocks))
        if not policy.is_fresh:
            given = given._replace(old=passes.log_probs(state.params, base, blocks))

        def step(state: PolicyState, _: None):
            gradient, sums = passes.gradient(state.params, base, blocks, given)
            gradient = jax.tree.map(lambda leaf: leaf / divisor, gradient)
            state, norm, finite = learn(policy, state, gradient, sums.loss)
            return state, (sums, norm, finite)

        if policy.is_fresh:
            state, (sums, norm, finite) = step(state, None)
            first = sums
        else:
            state, found = jax.lax.scan(step, state, length=config.epochs)
            sums, norm, finite = jax.tree.map(lambda leaf: leaf[-1], found)
            finite, first = found[2].all(), jax.tree.map(lambda leaf: leaf[0], found[0])
        tokens = jnp.maximum(sums.departure.actions, 1.0)
        metrics |= {
            "loss": first.loss / divisor,
            # NaN, which means leave out, where nothing is learned from: 0 would tell of certainty.
            "entropy": first.entropy / sums.departure.actions,
            "grad_norm": norm,
            "skipped": 1.0 - finite.astype(jnp.float32),
            "learning_rate": policy.schedule(state.step * config.epochs),
            "tokens": sums.departure.actions,
            "padding_share": 1.0 - sums.tokens.real / jnp.maximum(sums.tokens.computed, 1.0),
        }
        if isinstance(config, TokenGRPOConfig):
            metrics |= {
                "clip_fraction": sums.departure.clipped / tokens,
                "kl_old": sums.departure.kl / tokens,
                "kl": first.reference_kl / tokens,
                "sampler_kl": first.correction.kl / tokens,
                "sampler_largest_ratio": first.correction.largest,
                "sampler_truncated": first.correction.truncated / tokens,
                "sampler_effective": first.correction.effective_share(),
            }
        return counted(state, sums.departure.actions, metrics)

    return jitted(policy, update, episode_shardings(policy.mesh))


def given_tokens(
    policy: TokenPolicy, episodes: TokenEpisodes
) -> tuple[PerToken, jax.Array, Metrics]:
    """What each token is learned with, what sums are divided by, and metrics of the rewards."""
    config, blocks = policy.config, episodes.blocks
    counts, rewards, scored, differs = (jnp.asarray(each) for each in episodes[1:])
    metrics: Metrics = {}
    advantages = jnp.ones(len(counts), jnp.float32)
    if isinstance(config, TokenGRPOConfig):
        groups = (-1, config.members)
        weights = jnp.asarray(policy.weights, jnp.float32)
        # A sum, not a matrix product: a GPU would round the factors of that.
        totals = jnp.where(scored, (rewards * weights[None]).sum(axis=1), 0.0)
        by_group = totals.reshape(groups), scored.reshape(groups)
        if config.learned == BEST:
            advantages = best_of_groups(*by_group)
        else:
            advantages = group_advantages(*by_group, scaled=config.scaled)
        advantages = jnp.where(differs, advantages.reshape(-1), 0.0)
        present = jnp.maximum(scored.sum().astype(jnp.float32), 1.0)
        metrics = {
            "return": totals.sum() / present,
            "advantage": jnp.abs(advantages).sum() / present,
            "unscored_share": 1.0 - scored.astype(jnp.float32).mean(),
            "flat_groups": (~differs).astype(jnp.float32).mean(),
        }
    each, divisor = _weights(config, counts)
    of_episode = jnp.minimum(blocks.episode, len(counts) - 1)
    learned = blocks.learned & (blocks.episode < len(counts))
    nothing = jnp.zeros(blocks.target.shape, jnp.float32)
    given = PerToken(
        old=nothing,
        reference=nothing,
        advantages=jnp.where(learned, advantages[of_episode], 0.0),
        weight=jnp.where(learned, each[of_episode], 0.0),
    )
    return given, jnp.maximum(divisor, 1.0), metrics


def _weights(config: TokenGRPOConfig | SFTConfig, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight of a token's loss by its episode `[N]`, and the divisor of the sum.

    They are those of `policy_gradient.aggregation`, for episodes whose tokens are in several rows.
    """
    episodes = (counts > 0).sum().astype(jnp.float32)
    ones = jnp.ones_like(counts)
    if isinstance(config, SFTConfig) or config.aggregation in (BNPO, DAPO):
        return ones, counts.sum()
    if config.aggregation == GRPO:
        return 1.0 / jnp.maximum(counts, 1.0), episodes
    assert config.aggregation == DR_GRPO
    return ones, config.longest * episodes

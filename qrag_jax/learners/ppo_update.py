"""PPO of a token policy with a critic: blocks of sampled tokens and rewards become ONE update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.advantages import packed_gae, whitened
from qrag_jax.algorithms.policy_gradient import (
    clipped,
    clipped_value_loss,
    kl_k1,
    kl_k3,
    sampler_weights,
    weighted_sum,
)
from qrag_jax.learners.policy_state import Critic, PolicyState
from qrag_jax.learners.ppo_config import LOSS, NONE, REWARD, TokenPPOConfig
from qrag_jax.learners.state import optimizer_step
from qrag_jax.learners.token_losses import Sums, TokenLosses, summed, token_count
from qrag_jax.learners.token_policy import (
    ROW_AXES,
    BlockPasses,
    Learned,
    Metrics,
    ReadValues,
    TokenPolicy,
    Update,
    ValueHead,
    counted,
    jitted,
    learn,
)
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.policies.tokens import TokenScores
from qrag_jax.rollouts.token_blocks import BlockShape, TokenBlocks, equal_blocks
from qrag_jax.rollouts.trajectories import TokenBatch


class PerAction(NamedTuple):
    """What is learned from each sampled token; float32 `[B, S]`.

    old: log-probabilities before the update; read if a batch gives several steps.
    reference: by the first weights of the stage; read if a KL is in the loss.
    advantages: A.
    weight: of the token's losses in their sums; 0: it is not learned from.
    value: by the critic before the update.
    returns: what values are regressed on.
    """

    old: jax.Array
    reference: jax.Array
    advantages: jax.Array
    weight: jax.Array
    value: jax.Array
    returns: jax.Array


class ValueSums(NamedTuple):
    """Totals over the tokens that are learned from."""

    loss: jax.Array
    tokens: TokenCount

    def plus(self, more: ValueSums) -> ValueSums:
        """The totals of both."""
        return jax.tree.map(jnp.add, self, more)

    def over(self, axes: tuple[str, ...]) -> ValueSums:
        """The totals of all devices along axes of the mesh."""
        return jax.lax.psum(self, axes)


@dataclasses.dataclass(frozen=True)
class PpoLoss:
    """The clipped surrogate of each token, weighted for its sampler, the KL and the entropy."""

    config: TokenPPOConfig

    def __call__(
        self, scores: TokenScores, block: TokenBlocks, given: PerAction
    ) -> tuple[jax.Array, Sums]:
        """The summed loss of one block, and the sums."""
        config, new, clip = self.config, scores.log_probs, self.config.clip
        # If a batch gives one step, its tokens are of the policy that learns.
        old = jax.lax.stop_gradient(new) if config.updates_per_batch == 1 else given.old
        losses = clipped(new, old, given.advantages, clip)
        losses = losses * sampler_weights(old, block.sampler, config.sampler_cap)
        kl = jnp.zeros_like(new)
        if config.kl and config.kl_in == LOSS:
            kl = kl_k3(new, given.reference)
            losses += config.kl * kl
        if config.entropy:
            losses -= config.entropy * scores.entropy
        each = TokenLosses(losses, new, old, kl)
        return summed(each, scores, block, given, clip=clip, cap=config.sampler_cap)


@dataclasses.dataclass(frozen=True)
class ValueLoss:
    """The clipped squared error of each value."""

    most: float  # how far a value may move from the one before the update

    def __call__(
        self, scores: jax.Array, block: TokenBlocks, given: PerAction
    ) -> tuple[jax.Array, ValueSums]:
        """The summed loss of one block, and the sums."""
        each = clipped_value_loss(scores, given.value, given.returns, self.most)
        loss = weighted_sum(each, given.weight)
        return loss, ValueSums(loss, token_count(block))


class PpoEpisodes(NamedTuple):
    """What an update takes.

    Attributes:
        blocks: rows of tokens, `[M, B, …]` for M minibatches; split over the devices along B.
        ends: bool `[M, B, S]`, the last token of each episode that is learned from.
        rewards: float32 `[N, K]`.
        scored: bool `[N]`.
    """

    blocks: TokenBlocks
    ends: jax.Array
    rewards: jax.Array
    scored: jax.Array


def ppo_episodes(
    policy: TokenPolicy[TokenPPOConfig], batch: TokenBatch, shape: BlockShape
) -> PpoEpisodes:
    """The episodes of a batch that something can be learned from, in blocks.

    Minibatches are neighbouring episodes, as many in each; whoever makes batches shuffles them.

    Raises:
        ValueError: the minibatches do not divide the episodes, or one that is learned from has two
            rows, whose tokens would have no common order.
    """
    config, learned = policy.config, batch.loss_mask
    number = len(batch.scored)
    if number % config.minibatches:
        raise ValueError(f"{number} episodes are no {config.minibatches} equal minibatches")
    rows = np.bincount(batch.episode, learned.any(axis=1), number + 1)[:-1]
    if rows.max(initial=0) > 1:
        raise ValueError(f"episode {rows.argmax()} has {rows.max():.0f} rows; PPO's have one")
    part = batch.episode // (number // config.minibatches)
    is_row = np.asarray(learned.any(axis=1))
    masks = [
        batch.log_prob_mask & (is_row & (part == each))[:, None]
        for each in range(config.minibatches)
    ]
    batches = [batch._replace(log_prob_mask=mask) for mask in masks]
    found = equal_blocks(batches, shape, policy.row_devices)
    together: Any = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    given: Any = batch.rewards.astype(np.float32), batch.scored
    return PpoEpisodes(together, _ends(together), *given)


def _ends(blocks: TokenBlocks) -> Any:
    """The last learned token of each row; those of a row lie one after the other."""
    learned, row = np.asarray(blocks.learned), np.asarray(blocks.row)
    ends = np.zeros(learned.shape, bool)
    for place in np.ndindex(learned.shape[:-1]):
        at = np.flatnonzero(learned[place])
        of = row[place][at]
        is_last = np.append(of[1:] != of[:-1], True)[: len(at)]
        ends[place][at[is_last]] = True
    return ends


def ppo_shardings(mesh: Mesh) -> Any:
    """Where the episodes of an update live: a `PpoEpisodes` of a sharding for each field."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    by_block: Any = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))
    return PpoEpisodes(by_block, by_block, replicated, replicated)


def make_ppo_update(policy: TokenPolicy[TokenPPOConfig]) -> Update:
    """Makes the jitted `(state, PpoEpisodes) → (state, metrics)`; the state is donated.

    With adapters it is `(state, PpoEpisodes, base)`. Losses are means over the learned tokens of a
    minibatch, on any mesh and in any blocks. Log-probabilities, values and advantages before the
    update are those of the whole batch, computed before its first step. A step whose loss or
    gradient is not finite learns nothing. Before update `policy.rests_until` the critic alone
    learns.

    Metrics are float32 scalars: `loss`, `value_loss`, `entropy` (NaN where nothing is learned
    from), `grad_norm`, `critic_grad_norm`, `learning_rate`, `tokens` (that are learned from),
    `padding_share`, `skipped` and `env_steps`; `return`, `advantage` (mean absolute, before they
    are whitened), `unscored_share` of episodes, `explained_variance` of the returns, `kl` to the
    reference in nats a token; `clip_fraction`, `kl_old`, `largest_ratio`; and of
    the sampler `sampler_kl`, `sampler_largest_ratio`, `sampler_truncated` and `sampler_effective`.
    """
    config, passes = policy.config, _Passes(policy)

    def update(state: PolicyState, episodes: PpoEpisodes, base: Params | None = None):
        given, metrics = _prepared(passes, state, episodes, base)
        awake = state.step >= policy.rests_until

        def step(state: PolicyState, number: jax.Array | int):
            blocks, own = jax.tree.map(lambda leaf: leaf[number], (episodes.blocks, given))
            return _stepped(passes, state, (base, awake), blocks, own)

        if config.updates_per_batch == 1:
            state, found = step(state, 0)
            found = jax.tree.map(lambda leaf: leaf[None], found)
        else:
            order = jnp.tile(jnp.arange(config.minibatches), config.epochs)
            state, found = jax.lax.scan(step, state, order)
        sums, tokens = found.sums, jnp.maximum(found.sums.departure.actions.sum(), 1.0)
        first = jax.tree.map(lambda leaf: leaf[: config.minibatches], sums)
        in_first = first.departure.actions.sum()
        if config.kl and config.kl_in != REWARD:
            metrics["kl"] = first.reference_kl.sum() / jnp.maximum(in_first, 1.0)
        correction = jax.tree.map(lambda leaf: leaf.sum(), first.correction)
        count = found.tokens
        metrics |= {
            "loss": found.loss.mean(),
            "value_loss": found.value_loss.mean(),
            "entropy": first.entropy.sum() / in_first,
            "grad_norm": found.norm.mean(),
            "critic_grad_norm": found.critic_norm.mean(),
            "skipped": 1.0 - found.finite.astype(jnp.float32).min(),
            "learning_rate": policy.schedule(state.step * config.updates_per_batch),
            "tokens": in_first,
            "padding_share": 1.0 - count.real.sum() / jnp.maximum(count.computed.sum(), 1.0),
            "clip_fraction": sums.departure.clipped.sum() / tokens,
            "kl_old": sums.departure.kl.sum() / tokens,
            "largest_ratio": sums.departure.largest.max(),
            "sampler_kl": correction.kl / jnp.maximum(in_first, 1.0),
            "sampler_largest_ratio": first.correction.largest.max(),
            "sampler_truncated": correction.truncated / jnp.maximum(in_first, 1.0),
            "sampler_effective": correction.effective_share(),
        }
        return counted(state, in_first, metrics)

    return jitted(policy, update, ppo_shardings(policy.mesh))


class _Step(NamedTuple):
    """What one optimizer step tells; scalars."""

    sums: Sums
    loss: jax.Array
    value_loss: jax.Array
    norm: jax.Array
    critic_norm: jax.Array
    finite: jax.Array
    tokens: TokenCount


class _Passes:
    """The passes of policy and critic."""

    def __init__(self, policy: TokenPolicy[TokenPPOConfig]) -> None:
        self.policy, config = policy, policy.config
        self.of_policy = BlockPasses(policy, PpoLoss(config))
        if config.critic != NONE:
            self.of_critic = BlockPasses(
                policy,
                ValueLoss(config.value_clip),
                ReadValues(),
                policy.shardings.critic.tower,  # type: ignore[union-attr]
            )

    def values(self, state: PolicyState, base: Params | None, blocks: TokenBlocks) -> jax.Array:
        """The critic's values `[B, S]`; 0 without one."""
        if state.critic is None:
            return jnp.zeros(blocks.target.shape, jnp.float32)
        head = ValueHead(state.critic.weights, state.critic.bias)
        return self.of_critic.found(Learned(state.critic.tower, head), base, blocks)


def _prepared(
    passes: _Passes, state: PolicyState, episodes: PpoEpisodes, base: Params | None
) -> tuple[PerAction, Metrics]:
    """All that is known before the first step, `[M, B, S]`, and metrics."""
    policy, blocks = passes.policy, episodes.blocks
    config = policy.config
    rewards, scored = jnp.asarray(episodes.rewards), jnp.asarray(episodes.scored)
    valid = blocks.learned & (blocks.episode < len(scored))
    tokens = jnp.maximum(valid.sum().astype(jnp.float32), 1.0)
    nothing = jnp.zeros(blocks.target.shape, jnp.float32)

    def each(read: Callable[[TokenBlocks], jax.Array]) -> jax.Array:
        if config.minibatches == 1:
            return read(jax.tree.map(lambda leaf: leaf[0], blocks))[None]
        return jax.lax.map(read, blocks)

    old = reference = nothing
    if config.kl:
        assert state.reference is not None
        reference = each(lambda b: passes.of_policy.log_probs(state.reference, base, b))
    if config.updates_per_batch > 1 or (config.kl and config.kl_in == REWARD):
        old = each(lambda b: passes.of_policy.log_probs(state.params, base, b))
    value = each(lambda b: passes.values(state, base, b))
    weights = jnp.asarray(policy.weights, jnp.float32)
    # A sum, not a matrix product: a GPU would round the factors of that.
    totals = jnp.where(scored, (rewards * weights[None]).sum(axis=1), 0.0)
    of_episode = totals[jnp.minimum(blocks.episode, len(scored) - 1)]
    by_token = jnp.where(episodes.ends & valid, of_episode, 0.0)
    kl = nothing
    if config.kl and config.kl_in == REWARD:
        kl = jnp.where(valid, kl_k1(old, reference), 0.0)
        by_token -= config.kl * kl
    flat = (-1, by_token.shape[-1])
    advantages, returns = (
        found.reshape(by_token.shape)
        for found in packed_gae(
            by_token.reshape(flat),
            value.reshape(flat),
            valid.reshape(flat),
            episodes.ends.reshape(flat),
            (config.gamma, config.lambda_),
        )
    )
    present = jnp.maximum(scored.sum().astype(jnp.float32), 1.0)
    error = jnp.where(valid, returns - value, 0.0)
    spread = jnp.where(valid, jnp.square(returns - returns.sum() / tokens), 0.0).sum()
    metrics = {
        "return": totals.sum() / present,
        "unscored_share": 1.0 - scored.astype(jnp.float32).mean(),
        "advantage": jnp.abs(advantages).sum() / tokens,
        "explained_variance": 1.0 - jnp.square(error).sum() / jnp.maximum(spread, 1e-8),
        "kl": kl.sum() / tokens,
    }
    given = PerAction(
        old=old,
        reference=reference,
        advantages=whitened(advantages, valid) if config.whiten else advantages,
        weight=valid.astype(jnp.float32),
        value=value,
        returns=returns,
    )
    return given, metrics


def _stepped(
    passes: _Passes,
    state: PolicyState,
    known: tuple[Params | None, jax.Array],
    blocks: TokenBlocks,
    given: PerAction,
) -> tuple[PolicyState, _Step]:
    """One optimizer step on a minibatch; `known` are the base, and whether the policy is awake."""
    policy, (base, awake) = passes.policy, known
    divisor = jnp.maximum((given.weight > 0).sum().astype(jnp.float32), 1.0)

    def mean(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf / divisor, tree)

    of_critic: Critic | None = None
    value_loss = critic_norm = jnp.zeros((), jnp.float32)
    critic = state.critic
    gradient, sums = passes.of_policy.gradient(state.params, base, blocks, given)
    tokens = sums.tokens
    if critic is not None:
        learned = Learned(critic.tower, ValueHead(critic.weights, critic.bias))
        found, of_values = passes.of_critic.gradients(learned, base, blocks, given)
        of_critic, value_loss = Critic(found.params, *found.further), of_values.loss
        tokens = TokenCount.total([tokens, of_values.tokens])
    # A loss that is not finite must stop both, so it is in both of their checks.
    total = sums.loss + value_loss
    state, norm, finite = learn(policy, state, mean(gradient), total, awake=awake)
    if of_critic is not None:
        assert policy.critic_optimizer is not None
        of_critic = mean(of_critic)
        critic_norm = optax.tree.norm(of_critic)
        finite &= jnp.isfinite(critic_norm)
        critic, critic_opt_state = optimizer_step(
            critic,
            state.critic_opt_state,
            of_critic,
            policy.critic_optimizer,
            jnp.isfinite(critic_norm) & jnp.isfinite(total),
        )
        state = state._replace(critic=critic, critic_opt_state=critic_opt_state)
    told = _Step(sums, sums.loss / divisor, value_loss / divisor, norm, critic_norm, finite, tokens)
    return state, told

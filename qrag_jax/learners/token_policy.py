"""A token policy over the mesh, and its update by sampled tokens and rewards, or by pairs of rows.

Blocks of rows are computed one after the other, forward and backward, on each device one at a time,
so memory holds one of them, whatever the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms import policy_gradient
from qrag_jax.algorithms.advantages import best_of_groups, group_advantages, varies
from qrag_jax.learners import config as configs
from qrag_jax.learners import update
from qrag_jax.learners.config import PreferenceConfig, SFTConfig, TokenGRPOConfig, TokenPPOConfig
from qrag_jax.learners.state import Critic, TrainState
from qrag_jax.learners.update import Metrics, PerAction, Sums
from qrag_jax.models.compute.lora import Leaves, attach, merge, trainable
from qrag_jax.models.compute.packing import Layout, add_rows, take_rows
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.models.trunks.transformer import HEAD, WORDS, Params, Transformer
from qrag_jax.policies.tokens import TokenScores, Vocabulary, token_scores
from qrag_jax.rollouts.trajectories import BlockShape, TokenBatch, TokenBlocks, token_blocks
from qrag_jax.runtime import mesh as meshes
from qrag_jax.runtime.mesh import AXES, DATA, FSDP, everywhere, on_each, row_devices

ROW_AXES = AXES[:2]  # devices along `tensor` compute the same rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPolicy(update.PolicyLearner):
    """A causal language model, or adapters on a frozen one, and how it learns.

    What is read of a sampled token are its `TokenScores`; by a critic, the value of the state in
    which it was sampled. A pass takes the parameters of adapters with the base that they are on, or
    all weights with the base None.
    """

    # maps tokens to hidden states; the head is its word table, or the leaf `HEAD`
    trunk: Transformer
    vocabulary: Vocabulary  # how hidden states become log-probabilities
    lora_scale: float = 1.0  # factor on the product of an adapter's two matrices
    # the policy learns nothing before this update, in which its critic warms up
    rests_until: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "trunk", self.trunk.clone(mesh=self.mesh))

    @property
    def row_devices(self) -> int:
        """Devices that rows are split over."""
        return math.prod(row_devices(self.mesh))

    def gradient(self, learned: Critic, base: Params | None, part: Any) -> tuple[Critic, Sums]:
        """See `PolicyLearner`; a part is `TokenBlocks` and what their tokens are learned with."""
        whole, config = merge(learned.tower, base), self.config
        of_pairs = isinstance(config, PreferenceConfig)
        loss: Callable[..., Sums] = pair_loss if of_pairs else token_loss
        trained, frozen, to_stored = trainable(self.trunk, whole, self.lora_scale)
        # The gradient of words is added up row by row, that of a head of its own next to it.
        tables = {path: trained.pop(path) for path in ((WORDS,), (HEAD,)) if path in trained}
        every = frozen | tables
        table = every[WORDS,]
        head = every.get((HEAD,), table)

        def of_replica(block: TokenBlocks, targets: Any, *total: Any) -> tuple[Any, Any]:
            words = self._words(table, block)

            def of_loss(layers: Leaves, lookups: Any, critic: tuple[Any, Any]) -> Any:
                used = unflatten_dict(frozen | layers), *(lookups or (words, head))
                read = self._read(used, critic, block)
                sums = update.over_axis(on_each(FSDP, partial(loss, config), read, block, targets))
                count = on_each(FSDP, token_count, block.layout).sum(axis=0)
                return sums.loss, sums._replace(tokens=count)

            lookups = (words, head) if tables else None
            _, back, sums = jax.vjp(of_loss, trained, lookups, learned[1:], has_aux=True)
            of_layers, of_lookups, of_critic = back(jnp.float32(1.0))
            layers, of_tables, critic = total
            if of_lookups is not None:
                of_words, of_head = of_lookups
                of_words = of_words.reshape(-1, of_words.shape[-1]).astype(jnp.float32)
                summed = add_rows(of_tables[WORDS,], block.tokens.reshape(-1), of_words)
                of_tables = of_tables | {(WORDS,): summed}
                owner = (HEAD,) if (HEAD,) in tables else (WORDS,)
                of_tables[owner] += of_head
            layers = jax.tree.map(jnp.add, layers, of_layers)
            return (layers, of_tables, jax.tree.map(jnp.add, critic, of_critic)), sums

        def one(block: tuple[TokenBlocks, Any], total: Any) -> tuple[Any, Any]:
            total, sums = on_each(DATA, of_replica, *block, *total)
            return total, update.over_axis(sums)

        zeros = meshes.zeros_like(self.mesh, (trained, tables, learned[1:]))
        total, sums = _summed(one, zeros, _by_device(self.mesh, part))
        of_layers, of_tables, of_critic = jax.tree.map(lambda leaf: leaf.sum(axis=0), total)
        return Critic(to_stored(of_layers | of_tables), *of_critic), sums

    def read(self, learned: Critic, base: Params | None, blocks: TokenBlocks) -> jax.Array:
        """Log-probabilities `[B, S]` of the sampled tokens, or a critic's values."""
        whole = attach(merge(learned.tower, base), self.lora_scale)
        prepared = self.trunk.prepare(whole, self.trunk.precision.products)
        table = prepared[WORDS]
        head = prepared.get(HEAD, table)
        of_devices = _by_device(self.mesh, blocks)

        def of_replica(block: TokenBlocks) -> jax.Array:
            used = prepared, self._words(table, block), head
            read = self._read(used, learned[1:], block)
            return read.log_probs if learned.weights is None else read

        def one(number: jax.Array, embedded: jax.Array) -> jax.Array:
            return embedded.at[:, :, number].set(on_each(DATA, of_replica, _at(of_devices, number)))

        nothing = jnp.zeros(of_devices.target.shape, jnp.float32)
        embedded = jax.lax.fori_loop(0, _number(of_devices), one, nothing)
        return embedded.reshape(blocks.target.shape)

    def _words(self, table: jax.Array, block: TokenBlocks) -> jax.Array:
        """The rows `[fsdp, T, H]` of the word table, which is never whole anywhere."""
        return on_each(FSDP, lambda tokens: everywhere(self.mesh, table[tokens]), block.tokens)

    def _read(
        self, used: tuple[Params, jax.Array, jax.Array], critic: tuple[Any, Any], block: TokenBlocks
    ) -> Any:
        """What is read of the sampled tokens `[fsdp, S]` of one block of each device.

        Args:
            used: prepared parameters, words `[fsdp, T, H]`, head `[V, H]`.
            critic: its weights and bias, or None.
        """
        (prepared, words, head), (weights, bias) = used, critic

        def hidden_before(words: jax.Array, block: TokenBlocks) -> jax.Array:
            hidden = jnp.asarray(self.trunk.apply({"params": prepared}, words, block.layout))
            return take_rows(hidden, block.place)

        before = on_each(FSDP, hidden_before, words, block)  # [fsdp, S, H]
        if weights is None:
            # Together, so that a block of the head is used once for all devices.
            devices, sampled, width = before.shape
            vocabulary = self.vocabulary._replace(numbers=self.vocabulary.numbers * devices)
            flat = before.reshape(-1, width), head, block.target.reshape(-1)
            scores = token_scores(vocabulary, *flat)
            return jax.tree.map(lambda leaf: leaf.reshape(devices, sampled), scores)
        states = before.astype(jnp.float32)
        return jnp.einsum("fsh,h->fs", states, weights, precision=EXACT) + bias


# ------------------------------------------------------------------------ losses of a block


def token_loss(
    config: SFTConfig | TokenGRPOConfig | TokenPPOConfig,
    read: TokenScores | jax.Array,
    block: TokenBlocks,
    targets: PerAction,
) -> Sums:
    """The loss of a block's sampled tokens, or of a critic's values."""
    if not isinstance(read, TokenScores):
        assert isinstance(config, TokenPPOConfig)
        losses = policy_gradient.clipped_value_loss(
            read, targets.value, targets.returns, config.value_clip
        )
        return Sums(policy_gradient.weighted_sum(losses, targets.weight), {}, {})
    rows = jnp.arange(len(block.layout.lengths))[:, None] == block.row[None]
    # If a batch gives one step, its tokens are of the policy that learns.
    how: dict[str, Any] = {"is_fresh": config.updates_per_batch == 1, "sampler": block.sampler}
    return update.action_loss(config, read, targets, rows=rows, **how)


def pair_loss(
    config: PreferenceConfig,
    scores: TokenScores,
    block: TokenBlocks,
    targets: tuple[jax.Array, jax.Array],
) -> Sums:
    """IPO or DPO of a block of pairs.

    Args:
        block: the first row of a group is the winner, the second the loser.
        targets: `pairs` of `TokenEpisodes`, the reference and the weights.
    """
    reference, weight = targets
    rows = jnp.arange(len(block.layout.lengths))[:, None] == block.row[None]
    rows = rows & block.valid[None]
    # Log-probabilities `[R]` of sequences, from those of tokens `[S]`; 0 where no row is.
    total = jnp.where(rows, scores.log_probs[None], 0.0).sum(axis=1)
    total = total / jnp.maximum(rows.sum(axis=1), 1) if config.averaged else total
    policy = total.reshape(-1, 2)
    h = policy_gradient.margins(policy, reference)
    if config.loss == configs.IPO:
        loss = policy_gradient.ipo_loss(h, weight, config.beta)
    else:
        loss = policy_gradient.dpo_loss(h, weight, config.beta, config.label_smoothing)
    of_pairs = {
        "margin": h,
        "accuracy": h > 0,
        "log_prob_winner": policy[:, 0],
        "log_prob_loser": policy[:, 1],
    }
    pairs = (weight > 0).sum().astype(jnp.float32)
    means = {
        name: (jnp.where(weight > 0, values, 0.0).sum(), pairs) for name, values in of_pairs.items()
    }
    return Sums(loss, means, {})


def token_count(layout: Layout) -> jax.Array:
    """The tokens of a block, those that rows share counted once, and its places, `[2]`."""
    real = (layout.row < len(layout.lengths)).sum().astype(jnp.float32)
    return jnp.stack([real, jnp.float32(len(layout.row))])


def _summed(
    one: Callable[[tuple[TokenBlocks, Any], Any], tuple[Any, Any]],
    zeros: Any,
    parts: tuple[TokenBlocks, Any],
) -> tuple[Any, Any]:
    """Runs over all blocks; returns the last total and the sums."""
    _, first = jax.eval_shape(one, _at(parts, 0), zeros)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)

    def body(number: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        total, sums = carry
        total, more = one(_at(parts, number), total)
        return total, update.added(sums, more)

    return jax.lax.fori_loop(0, _number(parts[0]), body, (zeros, nothing))


def _by_device(mesh: Mesh, tree: Any) -> Any:
    """Leaves `[B, …]` → `[data, fsdp, B / devices, …]`."""
    sizes = row_devices(mesh)
    split = jax.tree.map(lambda leaf: leaf.reshape(*sizes, -1, *leaf.shape[1:]), tree)
    return meshes.by_device(mesh, split)


def _at(tree: Any, number: jax.Array | int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:, :, number], tree)


def _number(blocks: TokenBlocks) -> jax.Array:
    """Blocks up to the last one that is not empty on any device."""
    used = jnp.any(blocks.layout.lengths > 0, axis=(0, 1, 3))
    return jnp.where(used, jnp.arange(1, len(used) + 1), 0).max()


# ------------------------------------------------------------------------ what an update takes


class TokenEpisodes(NamedTuple):
    """What an update takes: episodes with rewards, or pairs of a better and a worse row."""

    # Rows of tokens, `[M, B, …]` for M minibatches; split over the devices along B. Of pairs M is
    # 1, and a group is a pair
    blocks: TokenBlocks
    rewards: Any = None  # float32 `[N]`; of GRPO, groups of neighbours
    scored: Any = None  # bool `[N]`
    counts: Any = None  # float32 `[N]`, tokens of each episode that are learned from
    # Of pairs, float32: log-probabilities of winner and loser by the reference `[1, B, Q, 2]`; and
    # the weight `[1, B, Q]`, 1, or 0 where there is no pair
    pairs: Any = None


def episode_shardings(mesh: Mesh) -> Any:
    """Where the episodes of an update live: a `TokenEpisodes` of a sharding for each field."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    by_block: Any = NamedSharding(mesh, PartitionSpec(None, ROW_AXES))
    return TokenEpisodes(by_block, replicated, replicated, replicated, by_block)


def token_episodes(policy: TokenPolicy, batch: TokenBatch, shape: BlockShape) -> TokenEpisodes:
    """The episodes of a batch that something can be learned from, in blocks.

    A group of GRPO's whose scored members do not differ counts in the divisor. Its gradient is 0
    without a KL, so then nothing of it is computed.
    Minibatches of PPO are neighbouring episodes, as many in each; whoever makes batches shuffles
    them. An episode that PPO learns from has one row: tokens of two would have no common order.
    """
    config, learned, number = policy.config, batch.loss_mask, len(batch.scored)
    counts = np.bincount(batch.episode, learned.sum(axis=1), number + 1)[:-1]
    if isinstance(config, TokenGRPOConfig):
        counts, computed = np.where(batch.scored, counts, 0.0), batch.scored
        if not config.beta:
            groups = (-1, config.members)
            differs: Any = varies(batch.rewards.reshape(groups), batch.scored.reshape(groups))
            computed = computed & np.repeat(differs, config.members)
        learned = learned & np.append(computed, False)[batch.episode][:, None]
    is_row = np.asarray(learned.any(axis=1))
    minibatches = getattr(config, "minibatches", 1)
    part = batch.episode // (number // minibatches)
    parts = [is_row & (part == minibatch) for minibatch in range(minibatches)]
    batches = [batch._replace(log_prob_mask=batch.log_prob_mask & rows[:, None]) for rows in parts]
    blocks_of_batches = token_blocks(batches, shape, policy.row_devices)
    blocks: Any = jax.tree.map(lambda *leaves: np.stack(leaves), *blocks_of_batches)
    return TokenEpisodes(blocks, batch.rewards, batch.scored, counts.astype(np.float32))


def pair_episodes(
    policy: TokenPolicy, batch: TokenBatch, shape: BlockShape, reference: np.ndarray
) -> TokenEpisodes:
    """The pairs of a batch that something can be learned from, in blocks; none is cut.

    A pair with a row of which no token is learned from is left out before anything is computed.

    Args:
        batch: pair g is the episodes 2g, its winner, and 2g + 1, its loser, of one row each.
        shape: by `choose_shape(…, whole=True)`.
        reference: float32 `[N]`, of each episode, by `row_log_probs`.
    """
    number, members = len(batch.scored), policy.config.members
    rows = np.bincount(batch.episode, batch.loss_mask.any(axis=1), number + 1)[:-1]
    kept = (rows.reshape(-1, members) > 0).all(axis=1)
    learned = batch.loss_mask & np.append(np.repeat(kept, members), False)[batch.episode][:, None]
    batch = batch._replace(log_prob_mask=learned)
    (blocks,) = token_blocks([batch], shape, policy.row_devices, whole=True)
    # The pair of each group of each block; the last one is none.
    pair = np.full((len(blocks.tokens), shape.groups), number // members)
    block, token = np.nonzero(blocks.valid)
    group = np.asarray(blocks.row)[block, token] // members
    pair[block, group] = np.asarray(blocks.episode)[block, token] // members
    of_none = np.zeros((1, members), np.float32)
    by_pair = np.concatenate([np.asarray(reference, np.float32).reshape(-1, members), of_none])
    pairs = by_pair[pair], np.append(kept, False).astype(np.float32)[pair]
    blocks, pairs = jax.tree.map(lambda leaf: leaf[None], (blocks, pairs))
    return TokenEpisodes(blocks, pairs=pairs)


# ------------------------------------------------------------------------ update


def make_token_update(policy: TokenPolicy) -> update.Update:
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

    def train_step(state: TrainState, episodes: TokenEpisodes, base: Params | None = None):
        targets: Any
        if isinstance(config, PreferenceConfig):
            targets, pairs = episodes.pairs, episodes.pairs[1].sum()
            divisors, metrics = jnp.maximum(pairs, 1.0)[None], {"pairs": pairs}
            is_learned = episodes.blocks.valid
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
            metrics["sampler_effective"] = policy_gradient.effective_share(*weights)
        if isinstance(config, TokenGRPOConfig):
            del metrics["largest_ratio"]
        return update.counted(state, actions, metrics)

    return policy.update(train_step, episode_shardings(policy.mesh))


def _prepared(
    policy: TokenPolicy, state: TrainState, episodes: TokenEpisodes, base: Params | None
) -> tuple[PerAction, jax.Array, Metrics]:
    """What each token is learned with `[M, B, S]`, what sums of each minibatch are divided by, and
    metrics of the rewards."""
    config, blocks = policy.config, episodes.blocks
    nothing = jnp.zeros(blocks.target.shape, jnp.float32)

    def read(by: Any) -> jax.Array:
        """By a policy or a critic."""
        return jax.lax.map(partial(policy.read, by, base), blocks)

    old = reference = value = nothing
    is_ppo = isinstance(config, TokenPPOConfig)
    kl_in_reward = is_ppo and config.kl_in == configs.REWARD and config.kl
    if kl_in_reward or getattr(config, "kl_weight", 0.0):
        # Adapters begin at the base or at the stage's own: then these are the reference.
        reference = read(Critic(state.reference))
    if config.updates_per_batch > 1 or kl_in_reward:
        old = read(Critic(state.params))
    if is_ppo and state.critic is not None:
        value = read(state.critic)
    targets = PerAction(old, reference, nothing, nothing, value, nothing)
    if is_ppo:
        return ppo_tokens(config, episodes, targets)
    return grpo_tokens(config, episodes, targets)


def grpo_tokens(
    config: SFTConfig | TokenGRPOConfig, episodes: TokenEpisodes, targets: PerAction
) -> tuple[PerAction, jax.Array, Metrics]:
    """Advantages and weights of GRPO or of imitation, divisors `[1]`, and metrics of rewards."""
    blocks, counts = episodes.blocks, jnp.asarray(episodes.counts)
    metrics: Metrics = {}
    advantages = jnp.ones(len(counts), jnp.float32)
    weights, divisor = policy_gradient.aggregation(policy_gradient.BNPO, counts, 0)
    if isinstance(config, TokenGRPOConfig):
        weights, divisor = policy_gradient.aggregation(config.aggregation, counts, config.longest)
        groups = (-1, config.members)
        rewards, metrics = _rewards(episodes)
        by_group = rewards.reshape(groups), jnp.asarray(episodes.scored).reshape(groups)
        if config.learned == configs.BEST:
            advantages = best_of_groups(*by_group)
        else:
            advantages = group_advantages(*by_group, scaled=config.scaled)
        advantages = advantages.reshape(-1)
        present = jnp.maximum(by_group[1].sum().astype(jnp.float32), 1.0)
        metrics["advantage"] = jnp.abs(advantages).sum() / present
        metrics["flat_groups"] = (~varies(*by_group)).astype(jnp.float32).mean()
    of_episode = jnp.minimum(blocks.episode, len(counts) - 1)
    targets = targets._replace(
        advantages=jnp.where(blocks.valid, advantages[of_episode], 0.0),
        weight=jnp.where(blocks.valid, weights[of_episode], 0.0),
    )
    return targets, jnp.maximum(divisor, 1.0)[None], metrics


def ppo_tokens(
    config: TokenPPOConfig, episodes: TokenEpisodes, targets: PerAction
) -> tuple[PerAction, jax.Array, Metrics]:
    """PPO's advantages and returns of given values, divisors `[M]`, and metrics of rewards."""
    blocks, scored = episodes.blocks, jnp.asarray(episodes.scored)
    valid = jnp.asarray(blocks.valid)
    # The sampled tokens of a row lie one after the other.
    row = jnp.where(valid, blocks.row, -1)
    following = jnp.pad(row[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1)
    ends = valid & (row != following)
    rewards, metrics = _rewards(episodes)
    of_episode = rewards[jnp.minimum(blocks.episode, len(scored) - 1)]
    by_token = jnp.where(ends, of_episode, 0.0)
    targets, of_advantages = update.ppo_actions(config, by_token, targets, valid, ends)
    weight = valid.astype(jnp.float32)
    divisors = jnp.maximum(weight.sum(axis=(1, 2)), 1.0)
    return targets._replace(weight=weight), divisors, metrics | of_advantages


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


def row_log_probs(policy: TokenPolicy) -> Callable[..., np.ndarray]:
    """Makes `(params, TokenBatch, BlockShape) → float32 [N]`, the log-probability of each episode.

    It is of the tokens that are learned from, summed or averaged as the config says; 0 if there are
    none. With adapters it is `(params, TokenBatch, BlockShape, base)`. Rows need be no pairs.
    """
    of_blocks = policy.on_mesh(PartitionSpec(ROW_AXES))

    def log_probs(params: Params, blocks: TokenBlocks, base: Params | None = None) -> jax.Array:
        return policy.read(Critic(params), base, blocks)

    placed = policy.shardings.params, of_blocks
    program = policy.program(log_probs, placed, policy.on_mesh(update.REPLICATED))

    def of_rows(params: Params, batch: TokenBatch, shape: BlockShape, *base: Params) -> np.ndarray:
        batch = batch._replace(log_prob_mask=batch.loss_mask)
        (blocks,) = token_blocks([batch], shape, policy.row_devices)
        nats = np.asarray(program(params, meshes.put_whole(blocks, of_blocks), *base))
        nats = nats[blocks.valid]
        episode, number = blocks.episode[blocks.valid], len(batch.scored)
        total: np.ndarray = np.bincount(episode, nats, number)
        if policy.config.averaged:
            total = total / np.maximum(np.bincount(episode, minlength=number), 1)
        return total.astype(np.float32)

    return of_rows

"""GRPO and PPO of a query encoder: states, pools, draws and rewards become ONE update.

The loss depends on the encoder only through the embeddings of states, and that of a state on its
own pool and draw alone. So a state is embedded once: its cotangent is known in the block in which
it is computed (`models.compute.ragged.pull_back`). Blocks bound the memory, whatever the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from qrag_jax.algorithms.advantages import (
    ends_of,
    group_advantages,
    mixed_advantages,
    step_advantages,
    varies,
)
from qrag_jax.algorithms.policy_gradient import BNPO, aggregation, clipped_value_loss, weighted_sum
from qrag_jax.learners import update
from qrag_jax.learners.config import PPOConfig, SearchGRPOConfig
from qrag_jax.learners.state import Critic, TrainState
from qrag_jax.learners.update import PerAction, Sums
from qrag_jax.models.compute.lora import merge
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, pull_back
from qrag_jax.models.embedding import Params, TextEncoder
from qrag_jax.policies import plackett_luce
from qrag_jax.policies.tokens import TokenScores
from qrag_jax.rollouts.pool_search import HopBatch
from qrag_jax.runtime.mesh import BATCH_AXES

_BY_EPISODE = PartitionSpec(BATCH_AXES)
_ORDER = 2**32 - 2  # of minibatches; not the number of any step


class Searches(NamedTuple):
    """What is learned from each search; `[N, T, …]`, or of rows `[R, …]`."""

    # These three as in `HopBatch`
    pool: jax.Array
    present: jax.Array
    actions: jax.Array
    targets: PerAction  # what it is learned with; the old log-probabilities are those of the draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryEncoder(update.PolicyLearner):
    """A query encoder, or adapters on a frozen base, and how it learns."""

    encoder: TextEncoder  # maps rows of tokens to embeddings
    blocks: Blocks  # how rows are packed
    config: SearchGRPOConfig | PPOConfig
    tau: float  # τ, the policy's temperature
    # of the episode's rewards `[E]` and of a search's rewards `[H]`
    weights: tuple[tuple[float, ...], tuple[float, ...]]
    # the weights that acted are those that learn, so that a batch's first ratio is exactly 1
    is_fresh: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", self.encoder.on(self.mesh))

    def gradient(self, learned: Critic, base: Params | None, part: Any) -> tuple[Critic, Sums]:
        """See `PolicyLearner`; a part is `TokenRows` and `Searches`."""
        rows, searches = part[0].flat, jax.tree.map(update.flattened, part[1])
        head, whole = learned[1:], merge(learned.tower, base)

        def total(embedded: jax.Array, head: Any, searches: Searches) -> jax.Array:
            return self._sums(embedded, Critic(None, *head), searches).loss

        def cotangents(embedded: jax.Array, searches: Searches) -> jax.Array:
            return jax.grad(total)(embedded, head, searches)

        tower, embedded, tokens = pull_back(
            self.encoder, self.blocks, whole, rows, cotangents, of_rows=searches
        )
        of_head = jax.grad(total, 1)(embedded, head, searches)
        sums = self._sums(embedded, learned, searches)._replace(tokens=tokens)
        return Critic(tower, *of_head), sums

    def read(
        self, by: Critic, base: Params | None, rows: TokenRows, searches: Searches
    ) -> jax.Array:
        """Log-probabilities `[N, T]`, or a critic's values: 0 where there was no search."""
        flat, whole = rows.flat, self.encoder.alone(merge(by.tower, base))
        embedded, _ = embed_rows(self.encoder, self.blocks, whole, flat)
        if by.weights is None:
            scores = self._scores(embedded, jax.tree.map(update.flattened, searches)).log_probs
        else:
            scores = jnp.where(flat.lengths > 0, _valued(embedded, by), 0.0)
        return scores.reshape(rows.lengths.shape)

    def _sums(self, embedded: jax.Array, by: Critic, searches: Searches) -> Sums:
        """Of policy or critic, without the tokens that were computed."""
        config, targets = self.config, searches.targets
        if by.weights is not None:
            assert isinstance(config, PPOConfig)
            values = _valued(embedded, by)
            losses = clipped_value_loss(values, targets.value, targets.returns, config.value_clip)
            return Sums(weighted_sum(losses, targets.weight), {}, {})
        scores = self._scores(embedded, searches)
        is_fresh = self.is_fresh and config.updates_per_batch == 1
        sums = update.action_loss(config, scores, targets, is_fresh=is_fresh)
        gap = jnp.where(targets.weight > 0, jnp.abs(scores.log_probs - targets.old), 0.0).sum()
        sums.means["replay_gap"] = gap, sums.means["entropy"][1]
        return sums

    def _scores(self, embedded: jax.Array, searches: Searches) -> TokenScores:
        """Of each search, `[R]`."""
        logits = plackett_luce.pool_logits(embedded, searches.pool, searches.present, self.tau)
        log_prob = plackett_luce.log_prob(logits, searches.actions)
        return TokenScores(log_prob, plackett_luce.entropy(logits))


def _valued(embedded: jax.Array, critic: Critic) -> jax.Array:
    return jnp.einsum("rd,d->r", embedded, critic.weights, precision=EXACT) + critic.bias


# ------------------------------------------------------------------------ update


def make_query_update(learner: QueryEncoder) -> update.Update:
    """The program `(state, HopBatch) → (state, metrics)`; see `Learner.update`.

    The batch is split over the mesh; all numbers are those of the whole batch on any mesh. Its
    number of episodes is a multiple of the devices and of `members`, and each minibatch is one of
    the devices.

    Metrics besides those of `learn_in_steps`: `return` (the mean of the weighted rewards), `hops`
    and `advantage` (mean absolute) per scored episode or search, `replay_gap` (mean difference of
    log-probabilities to the stored ones), `unscored_share` of episodes, `flat_groups` (share of
    groups without different rewards, GRPO), `explained_variance` and `kl` (PPO).
    """
    config, split = learner.config, learner.on_mesh(_BY_EPISODE)
    name = BNPO if isinstance(config, PPOConfig) else config.aggregation

    def train_step(state: TrainState, batch: HopBatch, base: Params | None = None):
        rows, searches, metrics = _prepared(learner, state, batch, base)
        valid, order = searches.targets.weight > 0, None
        counts = valid.sum(axis=-1).astype(jnp.float32)
        weights, divisor = aggregation(name, counts, valid.shape[1])
        divisors = divisor[None]
        if config.updates_per_batch > 1:
            order = minibatch_order(state, config, len(counts))
            divisors = jax.vmap(lambda n: aggregation(name, n, valid.shape[1])[1])(counts[order])
        weight = jnp.where(rows.lengths > 0, weights[:, None], 0.0)
        every = rows, searches._replace(targets=searches.targets._replace(weight=weight))

        def part_of(places: jax.Array | None) -> tuple[TokenRows, Searches]:
            if places is None:
                return every
            part = jax.tree.map(lambda leaf: leaf[places], every)
            return jax.lax.with_sharding_constraint(part, split)

        divisors = jnp.maximum(divisors, 1.0)
        state, learned = learner.learn_in_steps(
            state, base, part_of, order, divisors, one_pass=config.minibatches
        )
        learned.pop("critic_grad_norm", None)  # not reported of searches
        return update.counted(state, (rows.lengths > 0).sum(dtype=jnp.int32), learned | metrics)

    return learner.update(train_step, split)


def minibatch_order(
    state: TrainState, config: SearchGRPOConfig | PPOConfig, episodes: int
) -> jax.Array:
    """The episodes of each minibatch of each epoch, `[epochs · minibatches, episodes of one]`."""
    # Not the keys of the episodes, which are drawn by the step's number alone.
    stream = jax.random.fold_in(state.key, _ORDER)
    key = jax.random.fold_in(stream, state.step)
    keys = jax.random.split(key, config.epochs)
    orders = jax.vmap(lambda k: jax.random.permutation(k, episodes))(keys)
    return orders.reshape(config.epochs * config.minibatches, -1)


def _prepared(
    learner: QueryEncoder, state: TrainState, batch: HopBatch, base: Params | None
) -> tuple[TokenRows, Searches, update.Metrics]:
    """The rows that are learned from, all that is known before the first gradient, and metrics."""
    config, scored = learner.config, batch.scored
    valid = (batch.lengths > 0) & scored[:, None]
    rows = TokenRows(batch.tokens, jnp.where(valid, batch.lengths, 0))
    nothing = jnp.zeros_like(batch.log_probs)
    old, weight = jnp.where(valid, batch.log_probs, 0.0), valid.astype(jnp.float32)
    targets = PerAction(old, nothing, nothing, weight, nothing, nothing)
    searches = Searches(batch.pool, batch.present, batch.actions, targets)
    of_episode, of_hop = (jnp.asarray(weights, jnp.float32) for weights in learner.weights)
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
    if isinstance(config, SearchGRPOConfig):
        advantages, differs = _group_advantages(config, learner.weights, batch, valid)
        metrics["flat_groups"] = (~differs).astype(jnp.float32).mean()
        if not (config.beta or config.entropy):
            # The gradient of the other groups is 0: they count in divisors, but are not computed.
            kept = jnp.repeat(differs, config.members)[:, None]
            rows = rows._replace(lengths=jnp.where(kept, rows.lengths, 0))
    if state.reference is not None:
        reference = learner.read(Critic(state.reference), base, rows, searches)
        targets = targets._replace(reference=reference)
    if isinstance(config, PPOConfig):
        critic: Any = state.critic
        value = learner.read(critic, base, rows, searches)
        last = ends_of(valid)
        by_hop += jnp.where(last, totals[:, None], 0.0)
        targets = targets._replace(value=value)
        metrics["kl"] = jnp.zeros(())
        targets, of_advantages = update.ppo_actions(config, by_hop, targets, valid, last)
        metrics |= of_advantages
        advantages = targets.advantages
    metrics["advantage"] = jnp.abs(advantages).sum() / number
    return rows, searches._replace(targets=targets._replace(advantages=advantages)), metrics


def _group_advantages(
    config: SearchGRPOConfig,
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
    for weight, terms in zip(of_episode, rewards, strict=True):
        differs |= varies(terms, scored)
        if of_hop:
            advantages += weight * group_advantages(terms, scored, scaled=config.scaled)[..., None]
    for i, weight in enumerate(of_hop):
        terms = batch.hop_rewards[..., i].reshape(hops.shape)
        advantages += weight * step_advantages(terms, hops, scaled=config.scaled)
        differs |= varies(terms.reshape(len(hops), -1), hops.reshape(len(hops), -1))
    return jnp.where(hops, advantages, 0.0).reshape(valid.shape), differs

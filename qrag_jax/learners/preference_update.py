"""IPO and DPO of a token policy: pairs of rows with a common prompt become ONE update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.preference import Pair, dpo_loss, ipo_loss, margins
from qrag_jax.learners.config import IPO, PreferenceConfig
from qrag_jax.learners.state import Critic, TrainState
from qrag_jax.learners.token_policy import ROW_AXES, BlockPasses, TokenPolicy, token_count
from qrag_jax.learners.update import REPLICATED, Update, counted, step_metrics
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.models.trunks.transformer import Params
from qrag_jax.policies.tokens import TokenScores
from qrag_jax.rollouts.token_blocks import BlockShape, TokenBlocks, token_blocks
from qrag_jax.rollouts.trajectories import TokenBatch
from qrag_jax.runtime.mesh import put_whole


class PerPair(NamedTuple):
    """What is learned from each group of a block, which is a pair; float32.

    reference: `[B, Q, 2]`, log-probabilities of winner and loser by the reference.
    weight: `[B, Q]`, of the pair's loss in the sum; 0: there is no pair.
    """

    reference: jax.Array
    weight: jax.Array


class PairSums(NamedTuple):
    """Totals over the pairs that are learned from; float32 scalars.

    loss, weight: of `algorithms.preference`.
    pairs: their number.
    margin: of h.
    right: number of pairs whose h is above 0.
    winner, loser: of the log-probabilities of sequences.
    actions: number of sampled tokens.
    tokens: of all rows.
    """

    loss: jax.Array
    weight: jax.Array
    pairs: jax.Array
    margin: jax.Array
    right: jax.Array
    winner: jax.Array
    loser: jax.Array
    actions: jax.Array
    tokens: TokenCount


def pair_loss(
    config: PreferenceConfig, scores: TokenScores, block: TokenBlocks, targets: PerPair
) -> tuple[jax.Array, PairSums]:
    """IPO or DPO of pairs; the first row of a group is the winner, the second the loser.

    See `token_policy.BlockLoss`.
    """
    weight = targets.weight
    rows = jnp.arange(len(block.lengths))[:, None] == block.row[None]
    rows = rows & block.learned[None]
    # Log-probabilities `[R]` of sequences, from those of tokens `[S]`; 0 where no row is.
    total = jnp.where(rows, scores.log_probs[None], 0.0).sum(axis=1)
    total = total / jnp.maximum(rows.sum(axis=1), 1) if config.averaged else total
    policy = Pair(*total.reshape(-1, 2).T)
    h = margins(policy, Pair(*targets.reference.T))
    if config.loss == IPO:
        loss, of_weights = ipo_loss(h, weight, config.beta)
    else:
        loss, of_weights = dpo_loss(h, weight, config.beta, config.label_smoothing)

    def over_pairs(each: jax.Array) -> jax.Array:
        return jnp.where(weight > 0, each, 0).sum().astype(jnp.float32)

    return loss, PairSums(
        loss=loss,
        weight=of_weights,
        pairs=over_pairs(jnp.ones_like(h)),
        margin=over_pairs(h),
        right=over_pairs(h > 0),
        winner=over_pairs(policy.winner),
        loser=over_pairs(policy.loser),
        actions=block.learned.sum().astype(jnp.float32),
        tokens=token_count(block),
    )


MEMBERS = 2  # rows of a pair: the winner, then the loser


class PairEpisodes(NamedTuple):
    """What an update takes; its leaves are split over the devices, block by block.

    Attributes:
        blocks: rows of tokens; a group is a pair.
        pairs: what is learned from each group.
    """

    blocks: TokenBlocks
    pairs: PerPair


def pair_episodes(
    policy: TokenPolicy[PreferenceConfig],
    batch: TokenBatch,
    shape: BlockShape,
    reference: np.ndarray,
    weights: np.ndarray,
) -> PairEpisodes:
    """The pairs of a batch that something can be learned from, in blocks; none is cut.

    A pair of weight 0, or with a row of which no token is learned from, is left out before anything
    is computed.

    Args:
        batch: pair g is group g, the episodes 2g, its winner, and 2g + 1, its loser, of one row
            each.
        shape: of groups of `MEMBERS`; `choose_shape(…, whole=True)` makes one with room for every
            pair.
        reference: float32 `[N]`, log-probability of each episode by the reference, of the same
            tokens and summed or averaged as the config says (`row_log_probs`).
        weights: float32 `[N/2]`, of each pair's loss, at least 0.

    Raises:
        ValueError: an episode has two rows, or the shape has no room for a pair.
    """
    number = len(batch.scored)
    rows = np.bincount(batch.episode, batch.loss_mask.any(axis=1), number + 1)[:-1]
    if rows.max(initial=0) > 1:
        raise ValueError(f"episode {rows.argmax()} has {rows.max():.0f} rows; one of a pair has 1")
    kept = (np.asarray(weights) > 0) & (rows.reshape(-1, MEMBERS) > 0).all(axis=1)
    learned = batch.loss_mask & np.append(np.repeat(kept, MEMBERS), False)[batch.episode][:, None]
    batch = batch._replace(loss_mask=learned, log_prob_mask=learned)
    (blocks,) = token_blocks([batch], shape, policy.row_devices, whole=True)
    pair = _pairs(blocks, number // MEMBERS)
    of_none = np.zeros((1, MEMBERS), np.float32)
    by_pair = np.concatenate([np.asarray(reference, np.float32).reshape(-1, MEMBERS), of_none])
    targets: Any = by_pair[pair], np.append(weights, 0.0).astype(np.float32)[pair]
    return PairEpisodes(blocks, PerPair(*targets))


def _pairs(blocks: TokenBlocks, number: int) -> np.ndarray:
    """The pair of each group of each block, int `[B, Q]`; `number` where there is none."""
    pair = np.full(np.shape(blocks.shared), number)
    block, token = np.nonzero(blocks.valid)
    group = np.asarray(blocks.row)[block, token] // MEMBERS
    pair[block, group] = np.asarray(blocks.episode)[block, token] // MEMBERS
    return pair


def pair_shardings(mesh: Mesh) -> Any:
    """Where the pairs of an update live: a sharding, for each of their arrays."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def make_preference_update(policy: TokenPolicy[PreferenceConfig]) -> Update:
    """Makes the jitted `(state, PairEpisodes) → (state, metrics)`; the state is donated.

    With adapters it is `(state, PairEpisodes, base)`. The loss is `Σ weight · loss / Σ weight` over
    the pairs of the whole batch, on any mesh and in any blocks. An update whose loss or gradient is
    not finite learns nothing.

    Metrics are float32 scalars: `loss`; over the pairs that are learned from, each counted once,
    `margin` (mean h in nats), `accuracy` (share with h above 0), `log_prob_winner` and
    `log_prob_loser` (means, of sequences as the config has them); all these are NaN where nothing
    is learned from. And `pairs` (their number), `grad_norm`, `learning_rate`, `padding_share`,
    `tokens` (sampled ones that are learned from), `skipped` and `env_steps`.
    """
    passes = BlockPasses(policy, partial(pair_loss, policy.config))

    def update(state: TrainState, episodes: PairEpisodes, base: Params | None = None):
        learned, sums = passes.gradient(Critic(state.params), base, *episodes)
        rate, divisor = policy.schedule(state.step), jnp.where(sums.weight > 0, sums.weight, 1.0)
        state, step = policy.learn(state, (learned.tower, None), sums.loss, divisor)
        metrics = step_metrics(step, rate, sums.tokens) | {
            "loss": sums.loss / sums.weight,
            "margin": sums.margin / sums.pairs,
            "accuracy": sums.right / sums.pairs,
            "log_prob_winner": sums.winner / sums.pairs,
            "log_prob_loser": sums.loser / sums.pairs,
            "pairs": sums.pairs,
            "tokens": sums.actions,
        }
        return counted(state, sums.actions, metrics)

    return policy.update(update, pair_shardings(policy.mesh))


RowLogProbs = Callable[..., np.ndarray]  # (params, TokenBatch, BlockShape), then a base if any


def row_log_probs(policy: TokenPolicy[PreferenceConfig]) -> RowLogProbs:
    """Makes `(params, TokenBatch, BlockShape) → float32 [N]`, the log-probability of each episode.

    It is of the tokens that are learned from, summed or averaged as the config says; 0 if there are
    none. By the parameters that a stage begins with it is what `pair_episodes` takes as the
    reference. With adapters it is `(params, TokenBatch, BlockShape, base)`. Rows need be no pairs.
    """
    passes, targets = (
        BlockPasses(policy, partial(pair_loss, policy.config)),
        pair_shardings(policy.mesh),
    )

    def log_probs(params: Params, blocks: TokenBlocks, base: Params | None = None) -> jax.Array:
        return passes.read(Critic(params), base, blocks)

    placed = policy.shardings.params, targets
    program = policy.program(log_probs, placed, policy.on_mesh(REPLICATED))

    def of_rows(params: Params, batch: TokenBatch, shape: BlockShape, *base: Params) -> np.ndarray:
        batch = batch._replace(log_prob_mask=batch.loss_mask)
        (blocks,) = token_blocks([batch], shape, policy.row_devices)
        found = np.asarray(program(params, put_whole(blocks, targets), *base))
        found = found[blocks.valid]
        episode, number = blocks.episode[blocks.valid], len(batch.scored)
        total: np.ndarray = np.bincount(episode, found, number)
        if policy.config.averaged:
            total = total / np.maximum(np.bincount(episode, minlength=number), 1)
        return total.astype(np.float32)

    return of_rows

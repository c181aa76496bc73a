"""IPO and DPO of a token policy: pairs of rows with a common prompt become ONE update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.learners.pair_losses import PairLoss, PerPair
from qrag_jax.learners.policy_state import PolicyState
from qrag_jax.learners.preference_config import PreferenceConfig
from qrag_jax.learners.token_policy import ROW_AXES, BlockPasses, TokenPolicy
from qrag_jax.learners.token_step import Update, counted, jitted, learn
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import BlockShape, TokenBlocks, token_blocks
from qrag_jax.runtime.gpu_options import compiler_options
from qrag_jax.runtime.mesh import put_whole

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
        ValueError: an array has another shape, a weight is below 0 or not finite, an episode has
            two rows, or the shape has no room for a pair.
    """
    number = len(batch.scored)
    if number % MEMBERS or len(reference) != number or len(weights) != number // MEMBERS:
        raise ValueError(
            f"{number} episodes, {len(reference)} log-probabilities by the reference and "
            f"{len(weights)} weights are no pairs"
        )
    if shape.members != MEMBERS:
        raise ValueError(f"{shape} is of groups of {shape.members} rows, not of {MEMBERS}")
    if not (np.isfinite(weights) & (np.asarray(weights) >= 0)).all():
        raise ValueError("a weight of a pair is below 0 or not finite")
    rows = np.bincount(batch.episode, batch.loss_mask.any(axis=1), number + 1)[:-1]
    if rows.max(initial=0) > 1:
        raise ValueError(f"episode {rows.argmax()} has {rows.max():.0f} rows; one of a pair has 1")
    kept = (np.asarray(weights) > 0) & (rows.reshape(-1, MEMBERS) > 0).all(axis=1)
    learned = batch.loss_mask & np.append(np.repeat(kept, MEMBERS), False)[batch.episode][:, None]
    batch = batch._replace(loss_mask=learned, log_prob_mask=learned)
    blocks = token_blocks(batch, shape, policy.row_devices, whole=True)
    pair = _pairs(blocks, number // MEMBERS)
    of_none = np.zeros((1, MEMBERS), np.float32)
    by_pair = np.concatenate([np.asarray(reference, np.float32).reshape(-1, MEMBERS), of_none])
    given: Any = by_pair[pair], np.append(weights, 0.0).astype(np.float32)[pair]
    return PairEpisodes(blocks, PerPair(*given))


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
    passes = BlockPasses(policy, PairLoss(policy.config))

    def update(state: PolicyState, episodes: PairEpisodes, base: Params | None = None):
        gradient, sums = passes.gradient(state.params, base, *episodes)
        divisor = jnp.where(sums.weight > 0, sums.weight, 1.0)
        gradient = jax.tree.map(lambda leaf: leaf / divisor, gradient)
        rate = policy.schedule(state.step)
        state, norm, finite = learn(policy, state, gradient, sums.loss)
        return counted(
            state,
            sums.actions,
            {
                "loss": sums.loss / sums.weight,
                "margin": sums.margin / sums.pairs,
                "accuracy": sums.right / sums.pairs,
                "log_prob_winner": sums.winner / sums.pairs,
                "log_prob_loser": sums.loser / sums.pairs,
                "pairs": sums.pairs,
                "grad_norm": norm,
                "skipped": 1.0 - finite.astype(jnp.float32),
                "learning_rate": rate,
                "tokens": sums.actions,
                "padding_share": 1.0 - sums.tokens.real / jnp.maximum(sums.tokens.computed, 1.0),
            },
        )

    return jitted(policy, update, pair_shardings(policy.mesh))


RowLogProbs = Callable[..., np.ndarray]  # (params, TokenBatch, BlockShape), then a base if any


def row_log_probs(policy: TokenPolicy[PreferenceConfig]) -> RowLogProbs:
    """Makes `(params, TokenBatch, BlockShape) → float32 [N]`, the log-probability of each episode.

    It is of the tokens that are learned from, summed or averaged as the config says; 0 if there are
    none. By the parameters that a stage begins with it is what `pair_episodes` takes as the
    reference. With adapters it is `(params, TokenBatch, BlockShape, base)`. Rows need be no pairs.
    """
    passes, mesh = BlockPasses(policy, PairLoss(policy.config)), policy.mesh
    of_base = () if policy.base_shardings is None else (policy.base_shardings,)

    def log_probs(params: Params, blocks: TokenBlocks, base: Params | None = None) -> jax.Array:
        return passes.log_probs(params, base, blocks)

    program = jax.jit(
        log_probs,
        in_shardings=(policy.shardings.params, pair_shardings(mesh), *of_base),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
        compiler_options=compiler_options(mesh, adapters=bool(of_base)),
    )

    def of_rows(params: Params, batch: TokenBatch, shape: BlockShape, *base: Params) -> np.ndarray:
        batch = batch._replace(log_prob_mask=batch.loss_mask)
        blocks = token_blocks(batch, shape, policy.row_devices)
        found = np.asarray(program(params, put_whole(blocks, pair_shardings(mesh)), *base))
        found = found[blocks.valid]
        episode, number = blocks.episode[blocks.valid], len(batch.scored)
        total: np.ndarray = np.bincount(episode, found, number)
        if policy.config.averaged:
            total = total / np.maximum(np.bincount(episode, minlength=number), 1)
        return total.astype(np.float32)

    return of_rows

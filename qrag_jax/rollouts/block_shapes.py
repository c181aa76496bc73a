"""Chooses the blocks in which rows are computed, by the lengths in the data and the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments.chunks import chunk_width
from qrag_jax.models.compute.packing import Blocks, Filling, choose_blocks, next_block
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import Actor, RolloutConfig, widths_of
from qrag_jax.runtime.aot import Rounds
from qrag_jax.runtime.platform import Platform

# Tokens computed at a time: as many as a CPU's caches hold, or as an accelerator needs to be busy.
CPU_BLOCK_TOKENS, ACCELERATOR_BLOCK_TOKENS = 512, 8192


def choose_block_shapes(
    config: EncoderConfig,
    rollout: RolloutConfig,
    encoder: TextEncoder,
    shape: EpisodeShape,
    stores: Sequence[TokenStore],
    *,
    platform: Platform,
) -> BlockShapes:
    """Blocks that suit the lengths found in the data and the devices."""
    steps, count = rollout.max_steps, config.length_buckets
    of_state, of_chunk = len(encoder.state_opening), len(encoder.chunk_opening)
    widths = widths_of(rollout, encoder, shape)
    in_state = min(rollout.max_chunk_tokens_in_state, shape.chunk_tokens)
    chunk_lengths = np.concatenate([store.chunk_lengths for store in stores])
    questions = np.concatenate([store.question_lengths for store in stores]) + of_state + 1
    chunks = _histogram(chunk_lengths + chunk_width(of_chunk, 0), widths.chunk)
    typical = int(np.minimum(chunk_lengths, in_state).mean()) + 1
    lengths = np.concatenate([questions + t * typical for t in range(steps)])
    states = _histogram(lengths, widths.state)
    both = np.zeros(max(widths) + 1, np.int64)
    both[: len(states)] += states
    # Gradients need as many chosen chunks as states.
    both[: len(chunks)] += chunks * states.sum() // max(chunks.sum(), 1)
    sizes, tokens = config.block_sizes, config.block_tokens
    choose = partial(blocks_of, platform=platform, sizes=sizes, tokens=tokens)
    # States and gradients are a small share of the tokens, so fewer shapes are enough for them.
    return BlockShapes(
        chunks=choose(chunks, count),
        states=choose(states, max(count - 1, 1)),
        gradients=choose(both, max(count - 1, 1)),
    )


def choose_row_blocks(config: EncoderConfig, longest: int, platform: Platform) -> Blocks:
    """Blocks for rows of up to `longest` tokens, of whose lengths nothing is known yet."""
    alike, count = np.ones(longest + 1, np.int64), config.length_buckets
    sizes, tokens = config.block_sizes, config.block_tokens
    return blocks_of(alike, count, platform=platform, sizes=sizes, tokens=tokens)


def blocks_of(
    histogram: np.ndarray, count: int, *, platform: Platform, sizes: int, tokens: int = 0
) -> Blocks:
    """Blocks for rows of which so many have each length.

    Args:
        count: of lengths of rows in a block.
        tokens: of a block; 0: as many as suit the platform.
    """
    usual = CPU_BLOCK_TOKENS if platform.on_cpu else ACCELERATOR_BLOCK_TOKENS
    multiples = (8,) if platform.on_cpu else (64, 8)
    return choose_blocks(histogram, tokens or usual, count, sizes, multiples=multiples)


def _histogram(lengths: np.ndarray, longest: int) -> np.ndarray:
    return np.bincount(np.minimum(lengths, longest), minlength=longest + 1)


# ---------------------------------------------------------------- rounds
# The loops over blocks (`models.compute.ragged`) end when all rows are computed, so a compiled
# program does not tell their rounds. Here the same plan is run on lengths alone.

BATCHES = 16  # of which the mean is taken


def loop_rounds(
    actor: Actor, shape: EpisodeShape, stores: Sequence[TokenStore], questions: int
) -> dict[tuple[int, int], Rounds]:
    """The course of each loop of playing and learning, by the number and width of its rows.

    Questions, numbers of chunks and chunks are drawn from the data, each by itself: no text is
    taken for a repeated one, and no episode ends early. Learning in the step that plays pads the
    rows of both towers to the wider ones, and has the mean course of both. Learning from scored
    episodes has a loop for each tower; that of the wider rows gets the mean course, too.

    Args:
        questions: that one device computes at a time.
    """
    rng, encoder, rollout = np.random.default_rng(0), actor.encoder, actor.config
    widths, steps, shapes = (
        widths_of(rollout, encoder, shape),
        rollout.max_steps,
        actor.block_shapes,
    )
    asked, counts, lengths = (
        np.concatenate([getattr(store, name) for store in stores])
        for name in ("question_lengths", "chunk_counts", "chunk_lengths")
    )
    number = rng.integers(len(counts), size=(BATCHES, questions))
    columns = shape.chunks + rollout.stop_action  # all STOPs are one short row, which is left out
    chunks = rng.choice(lengths, (BATCHES, questions, columns))
    rows = np.minimum(chunks + chunk_width(len(encoder.chunk_opening), 0), widths.chunk)
    rows = np.where(np.arange(columns) < counts[number][..., None], rows, 0)
    in_state = np.minimum(chunks, rollout.max_chunk_tokens_in_state) + 1
    state = asked[number] + len(encoder.state_opening) + 1
    # After 0 to T-1 actions. Any chunk may be taken; the first ones stand for all.
    states = np.stack([state + in_state[..., :t].sum(axis=-1) for t in range(steps)], axis=1)
    states = np.minimum(states, widths.state)
    chosen = np.stack([rows[..., min(step, columns - 1)] for step in range(steps)], axis=1)
    of_towers = [each.reshape(BATCHES, -1) for each in (chosen, states)]
    narrower = of_towers[widths.chunk > widths.state]
    learned, rows = steps * questions, rows.reshape(BATCHES, -1)
    return {
        (rows.shape[1], widths.chunk): rounds_of(shapes.chunks, rows),
        (learned, min(widths)): rounds_of(shapes.gradients, narrower),
        (learned, max(widths)): rounds_of(shapes.gradients, np.concatenate(of_towers)),
        (questions, widths.state): rounds_of(shapes.states, states.reshape(-1, questions)),
    }


def even_rounds(blocks: Blocks, rows: int, longest: int) -> dict[tuple[int, int], Rounds]:
    """As `loop_rounds`, for so many rows of up to `longest` tokens, all lengths as likely."""
    lengths = np.random.default_rng(0).integers(1, longest + 1, (BATCHES, rows))
    return {(rows, longest): rounds_of(blocks, lengths)}


def rounds_of(blocks: Blocks, lengths: np.ndarray) -> Rounds:
    """The mean course of the loop over blocks for rows of these lengths, `[batches, N]`."""
    ordered = jnp.asarray(np.sort(lengths, axis=1).astype(np.int32))
    counts = np.asarray(_counts(blocks, ordered), np.float64).sum(axis=0)
    total = counts.sum()
    return Rounds(float(total / len(lengths)), tuple((counts / max(total, 1.0)).tolist()))


@partial(jax.jit, static_argnums=0)
def _counts(blocks: Blocks, ordered: jax.Array) -> jax.Array:
    """Blocks of each shape, `[batches, shapes]`, for ascending lengths `[batches, N]`."""
    count = ordered.shape[1]
    shapes = len(list(blocks.shapes(count)))

    def one_batch(lengths: jax.Array) -> jax.Array:
        def one_block(loop: tuple[jax.Array, Filling]) -> tuple[jax.Array, Filling]:
            counts, left = loop
            block = next_block(blocks, lengths, left)
            left = Filling(left.low + block.bottom, left.high - block.top)
            return counts.at[block.shape].add(1), left

        absent = (lengths == 0).sum(dtype=jnp.int32)
        start = jnp.zeros(shapes, jnp.int32), Filling(absent, jnp.int32(count))
        return jax.lax.while_loop(lambda loop: loop[1].low < loop[1].high, one_block, start)[0]

    return jax.lax.map(one_batch, ordered)

"""Chooses the blocks in which rows are computed, by the lengths in the data and the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments.chunks import chunk_width
from qrag_jax.models.compute.packing import Blocks, choose_blocks
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.embedding import TextEncoder
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.rollouts.chunks import Actor, RolloutConfig, widths_of
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
    chunks, states, both = _histograms(rollout, encoder, shape, stores)
    # States and gradients are a small share of the tokens, so fewer shapes are enough for them.
    return BlockShapes(
        chunks=blocks_of(config, chunks, platform),
        states=blocks_of(config, states, platform, fewer=1),
        gradients=blocks_of(config, both, platform, fewer=1),
    )


def blocks_of(
    config: EncoderConfig, histogram: np.ndarray, platform: Platform, *, fewer: int = 0
) -> Blocks:
    """Blocks for rows whose lengths are distributed as in the histogram, of `fewer` lengths."""
    usual = CPU_BLOCK_TOKENS if platform.on_cpu else ACCELERATOR_BLOCK_TOKENS
    tokens, count = config.block_tokens or usual, max(config.length_buckets - fewer, 1)
    # Kernels of attention compute tiles of 64 positions.
    multiples = (8,) if platform.on_cpu else (64, 8)
    return choose_blocks(histogram, tokens, count, config.block_sizes, multiples=multiples)


def _histograms(
    rollout: RolloutConfig, encoder: TextEncoder, shape: EpisodeShape, stores: Sequence[TokenStore]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many rows have each length: of chunks, of states, and of both in gradients."""
    widths, chunk_lengths = widths_of(rollout, encoder, shape), _of_all(stores, "chunk_lengths")
    chunks = _histogram(chunk_lengths + chunk_width(len(encoder.chunk_opening), 0), widths.chunk)
    in_state = min(rollout.max_chunk_tokens_in_state, shape.chunk_tokens)
    typical = int(np.minimum(chunk_lengths, in_state).mean()) + 1
    questions = _of_all(stores, "question_lengths") + len(encoder.state_opening) + 1
    lengths = np.concatenate([questions + t * typical for t in range(rollout.max_steps)])
    states = _histogram(lengths, widths.state)
    both = np.zeros(max(widths) + 1, np.int64)
    both[: len(states)] += states
    # Gradients need as many chosen chunks as states.
    both[: len(chunks)] += chunks * states.sum() // max(chunks.sum(), 1)
    return chunks, states, both


def _histogram(lengths: np.ndarray, longest: int) -> np.ndarray:
    return np.bincount(np.minimum(lengths, longest), minlength=longest + 1)


def _of_all(stores: Sequence[TokenStore], name: str) -> np.ndarray:
    return np.concatenate([getattr(store, name) for store in stores])


def mean_rows(
    actor: Actor, shape: EpisodeShape, stores: Sequence[TokenStore]
) -> tuple[float, float, float]:
    """The mean number of a question's chunks, and the mean tokens of a chunk and of a state."""
    chunks, states, _ = _histograms(actor.config, actor.encoder, shape, stores)
    chunk, state = (float(np.average(range(len(h)), weights=h)) for h in (chunks, states))
    return float(_of_all(stores, "chunk_counts").mean()), chunk, state

"""Chooses the blocks in which rows are computed, by the lengths in the data and the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.tokens import Tokens
from qrag_jax.environments.chunks import chunk_width, state_width
from qrag_jax.models.compute.packing import Blocks, choose_blocks
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.runtime.platform import Platform

# Tokens computed at a time: as many as a CPU's caches hold, or as an accelerator needs to be busy.
CPU_BLOCK_TOKENS, ACCELERATOR_BLOCK_TOKENS = 512, 8192


def choose_block_shapes(
    config: EncoderConfig,
    rollout: RolloutConfig,
    encoder: TextEncoder,
    shape: EpisodeShape,
    stores: Sequence[Tokens],
    *,
    platform: Platform,
) -> BlockShapes:
    """Blocks that suit the lengths found in the data and the devices."""
    steps, count = rollout.max_steps, config.length_buckets
    of_state, of_chunk = len(encoder.state_opening), len(encoder.chunk_opening)
    chunk_row = min(rollout.max_chunk_tokens, chunk_width(of_chunk, shape.chunk_tokens))
    in_state = min(rollout.max_chunk_tokens_in_state, shape.chunk_tokens)
    state_row = state_width(of_state, shape.question_tokens, in_state, steps - 1)
    chunk_lengths = np.concatenate([store.chunk_lengths for store in stores])
    questions = np.concatenate([store.question_lengths for store in stores]) + of_state + 1
    chunks = _histogram(chunk_lengths + chunk_width(of_chunk, 0), chunk_row)
    typical = int(np.minimum(chunk_lengths, in_state).mean()) + 1
    lengths = np.concatenate([questions + t * typical for t in range(steps)])
    states = _histogram(lengths, state_row)
    both = np.zeros(max(chunk_row, state_row) + 1, np.int64)
    both[: len(states)] += states
    # Gradients need as many chosen chunks as states.
    both[: len(chunks)] += chunks * states.sum() // max(chunks.sum(), 1)
    tokens, sizes = _tokens(config, platform), config.block_sizes
    choose = partial(choose_blocks, multiples=_multiples(platform))
    # States and gradients are a small share of the tokens, so fewer shapes are enough for them.
    return BlockShapes(
        chunks=choose(chunks, tokens, count, sizes),
        states=choose(states, tokens, max(count - 1, 1), sizes),
        gradients=choose(both, tokens, max(count - 1, 1), sizes),
    )


def choose_row_blocks(config: EncoderConfig, longest: int, platform: Platform) -> Blocks:
    """Blocks for rows of up to `longest` tokens, of whose lengths nothing is known yet."""
    alike = np.ones(longest + 1, np.int64)
    tokens, multiples = _tokens(config, platform), _multiples(platform)
    return choose_blocks(
        alike, tokens, config.length_buckets, config.block_sizes, multiples=multiples
    )


def _tokens(config: EncoderConfig, platform: Platform) -> int:
    usual = CPU_BLOCK_TOKENS if platform.on_cpu else ACCELERATOR_BLOCK_TOKENS
    return config.block_tokens or usual


def _multiples(platform: Platform) -> tuple[int, ...]:
    return (8,) if platform.on_cpu else (64, 8)


def _histogram(lengths: np.ndarray, longest: int) -> np.ndarray:
    return np.bincount(np.minimum(lengths, longest), minlength=longest + 1)

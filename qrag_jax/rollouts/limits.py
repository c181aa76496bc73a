"""Checks that episodes fit the encoder, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping

from qrag_jax.data.episodes import EpisodeShape, check_steps
from qrag_jax.data.tokens import Tokens
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import chunk_width, state_width
from qrag_jax.errors import InputError
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import RolloutConfig


def check_fit(
    config: RolloutConfig, encoder: TextEncoder, shape: EpisodeShape, stores: Mapping[str, Tokens]
) -> None:
    """Refuses settings whose rows do not fit the encoder, or whose episodes fit no document.

    Args:
        shape: sizes of the longest question, chunk and document.
        stores: tokens by source; the names are for messages.
    """
    check_steps(config.max_steps, stores)
    positions.check_chunks(config.positions, shape.chunks)
    in_state = min(config.max_chunk_tokens_in_state, shape.chunk_tokens)
    max_positions, opening = encoder.max_positions, len(encoder.state_opening)
    longest = state_width(opening, shape.question_tokens, in_state, config.max_steps - 1)
    if longest > max_positions:
        raise InputError(
            f"a state can reach {longest} tokens ({shape.question_tokens} of the question and "
            f"{config.max_steps - 1} chunks of {in_state}), but the encoder has "
            f"{max_positions} positions; lower config.data.max_chunk_tokens_in_state, "
            "config.data.max_question_tokens or config.env.max_steps."
        )
    opening = len(encoder.chunk_opening)
    if config.max_chunk_tokens < chunk_width(opening, 1):
        raise InputError(
            f"config.data.max_chunk_tokens is {config.max_chunk_tokens}, but a chunk row has "
            f"{chunk_width(opening, 0)} tokens before any text (special tokens and "
            "config.encoder.chunk_prefix); raise it."
        )
    row = min(config.max_chunk_tokens, chunk_width(opening, shape.chunk_tokens))
    if row > max_positions:
        raise InputError(
            f"a chunk row has up to {row} tokens, but the encoder has {max_positions} positions; "
            "lower config.data.max_chunk_tokens."
        )

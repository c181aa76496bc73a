"""The chunks of one document as a Markov decision process, in pure functions on the device.

State: the question followed by the chunks taken so far. Action: the index of a chunk not taken
yet. An episode ends after `max_steps` actions, when no chunk is left or, unless `never_terminate`,
once every supporting fact is taken, if any is known (Q-RAG, arXiv 2511.07328). If there is a STOP
action, which is an empty chunk after the others (`with_stop`), taking it also ends the episode.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.data.episodes import NO_FACT, EpisodeBatch
from qrag_jax.environments.positions import KINDS
from qrag_jax.errors import Natural, one_of

NOT_TAKEN = -1


@dataclasses.dataclass(frozen=True)
class ChunksConfig:
    """Section `env`."""

    # T, chunks taken per episode; 0: as many as the training question with the most supporting
    # facts needs, or 2 where no facts are known
    max_steps: Natural = 2
    # Continue after all supporting facts are found or, with rewards of a language model, after a
    # reward completes the episode (config.reward.completion_threshold).
    never_terminate: bool = True
    sort_by_index: bool = False  # states list chunks in document order, else in the order taken
    # Positions at which chunk embeddings are rotated: none, absolute, random, random_published or
    # relative.
    positions: Annotated[str, one_of(KINDS)] = "none"
    stop_action: bool = False  # adds an action STOP, which ends the episode


class ChunksState(NamedTuple):
    taken: jax.Array  # `[B, T]`, chunk indices in the order taken, `NOT_TAKEN` for steps to come
    available: jax.Array  # `[B, C]`, chunks that may be taken now
    done: jax.Array  # `[B]`, whether the episode has ended; further steps do not change it


def reset(batch: EpisodeBatch, max_steps: int) -> ChunksState:
    episodes = batch.chunk_mask.shape[0]
    available = jnp.asarray(batch.chunk_mask)
    return ChunksState(
        taken=jnp.full((episodes, max_steps), NOT_TAKEN, jnp.int32),
        available=available,
        done=~available.any(axis=1),
    )


def with_stop(batch: EpisodeBatch) -> EpisodeBatch:
    """The batch with STOP as one more chunk in the last column: empty, never a supporting fact.

    The chunk tower learns its embedding, of `[CLS] [SEP]`, like that of any other chunk.
    """

    def one_more(array: jax.Array, value: int | jax.Array = 0) -> jax.Array:
        column = jnp.broadcast_to(jnp.asarray(value, array.dtype), array[:, :1].shape)
        return jnp.concatenate([array, column], axis=1)

    return batch._replace(
        chunks=one_more(batch.chunks),
        chunk_lengths=one_more(batch.chunk_lengths),
        chunk_mask=one_more(batch.chunk_mask, batch.chunk_mask.any(axis=1, keepdims=True)),
        rank=one_more(batch.rank, NO_FACT),
    )


def step(
    state: ChunksState, batch: EpisodeBatch, action: jax.Array, t: jax.Array, rules: ChunksConfig
) -> ChunksState:
    """Takes chunk `action` `[B]` at time `t` (scalar) in every episode that has not ended."""
    max_steps = state.taken.shape[1]
    live = ~state.done
    taken = state.taken.at[:, t].set(jnp.where(live, action, NOT_TAKEN))
    chosen = jax.nn.one_hot(action, state.available.shape[1], dtype=bool) & live[:, None]
    available = state.available & ~chosen
    done = state.done | ~available.any(axis=1) | (t + 1 >= max_steps)
    if not rules.never_terminate:
        missing = (batch.support & available).any(axis=1)
        done = done | (batch.support.any(axis=1) & ~missing)
    if rules.stop_action:
        done = done | (action == state.available.shape[1] - 1)
    return ChunksState(taken=taken, available=available, done=done)


def join_parts(
    parts: jax.Array, lengths: jax.Array, opening: tuple[int, ...], encoder: Any, width: int
) -> tuple[jax.Array, jax.Array]:
    """`opening part [SEP] part [SEP] …` without padding inside, for every row.

    Args:
        parts: `[B, P, Lp]` token ids without special tokens.
        lengths: `[B, P]` tokens of each part; a part of length -1 is absent (no [SEP] either).

    Returns:
        tokens `[B, width]`, padded on the right, and row lengths `[B]`.
    """
    rows = jnp.arange(parts.shape[0])[:, None]
    sizes = jnp.where(lengths < 0, 0, lengths + 1)  # each part brings its separator
    ends = len(opening) + jnp.cumsum(sizes, axis=1)
    starts = ends - sizes
    column = jnp.arange(width)
    # The part a column falls into is the number of parts that ended before it.
    part = (column[None, :, None] >= ends[:, None, :]).sum(-1)
    inside = part < parts.shape[1]
    part = jnp.minimum(part, parts.shape[1] - 1)
    offset = column[None, :] - starts[rows, part]
    token = parts[rows, part, jnp.clip(offset, 0, parts.shape[2] - 1)]
    token = jnp.where(offset == lengths[rows, part], encoder.sep_id, token)
    token = jnp.where(inside, token, encoder.pad_id)
    if opening:
        token = token.at[:, : len(opening)].set(jnp.array(opening, token.dtype))
    return token, ends[:, -1]


def state_rows(
    batch: EpisodeBatch, taken: jax.Array, encoder: Any, *, chunk_tokens: int, sort_by_index: bool
) -> tuple[jax.Array, jax.Array]:
    """The text of each state as one row: question, then the chunks taken so far.

    Args:
        taken: `[B, K]` chunk indices, `NOT_TAKEN` where none.
        chunk_tokens: tokens of a chunk kept in the state (`max_chunk_tokens_in_state`).

    Returns:
        tokens `[B, W]` and lengths `[B]`, where W is `state_width` of K chunks.
    """
    if sort_by_index:
        last = batch.chunk_mask.shape[1]
        taken = jnp.sort(jnp.where(taken == NOT_TAKEN, last, taken), axis=1)
        taken = jnp.where(taken == last, NOT_TAKEN, taken)
    rows = jnp.arange(taken.shape[0])[:, None]
    index = jnp.maximum(taken, 0)
    kept = min(chunk_tokens, batch.chunks.shape[2])
    chunks = batch.chunks[rows, index, :kept]
    lengths = jnp.minimum(batch.chunk_lengths[rows, index], kept)
    lengths = jnp.where(taken == NOT_TAKEN, -1, lengths)
    question = batch.question[:, None]
    part_width = max(question.shape[2], chunks.shape[2])
    parts = jnp.concatenate([_widen(question, part_width), _widen(chunks, part_width)], axis=1)
    lengths = jnp.concatenate([batch.question_length[:, None], lengths], axis=1)
    opening = encoder.state_opening
    width = state_width(len(opening), question.shape[2], kept, taken.shape[1])
    return join_parts(parts, lengths, opening, encoder, width)


def chunk_rows(
    batch: EpisodeBatch, encoder: Any, *, row_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Every chunk as an encoder row `opening chunk [SEP]` of at most `row_tokens` tokens.

    Returns:
        tokens `[B, C, W]` and lengths `[B, C]`, 0 where the document has no such chunk.
    """
    episodes, chunks, tokens = batch.chunks.shape
    kept = min(tokens, row_tokens - len(encoder.chunk_opening) - 1)
    parts = batch.chunks[:, :, :kept].reshape(episodes * chunks, 1, kept)
    lengths = jnp.minimum(batch.chunk_lengths, kept).reshape(-1, 1)
    width = chunk_width(len(encoder.chunk_opening), kept)
    rows, row_lengths = join_parts(parts, lengths, encoder.chunk_opening, encoder, width)
    row_lengths = jnp.where(batch.chunk_mask, row_lengths.reshape(episodes, chunks), 0)
    return rows.reshape(episodes, chunks, -1), row_lengths


def state_width(opening: int, question_tokens: int, chunk_tokens: int, chunks: int) -> int:
    """Tokens of the longest state with `chunks` chunks that opens with `opening` tokens."""
    return opening + question_tokens + 1 + chunks * (chunk_tokens + 1)


def chunk_width(opening: int, chunk_tokens: int) -> int:
    """Tokens of the longest chunk row that opens with `opening` tokens."""
    return opening + chunk_tokens + 1


def _widen(parts: jax.Array, width: int) -> jax.Array:
    return jnp.pad(parts, ((0, 0), (0, 0), (0, width - parts.shape[2])))

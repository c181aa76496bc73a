"""Replays episodes with known actions for other towers; all states are encoded at once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments import chunks as env
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.ragged import TokenCount, TokenRows, embed_rows
from qrag_jax.models.compute.rope import rotate
from qrag_jax.models.heads.embedding import Params
from qrag_jax.policies import soft_q
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, Trajectory, positions_of


def replay(
    actor: Actor,
    params: Params | Adapted,
    batch: EpisodeBatch,
    draws: Draws,
    actions: jax.Array,
) -> Trajectory:
    """Plays episodes again with the actions that were taken.

    The trajectory's Q-values, entropy and embeddings stay empty: the caller computes them for the
    towers that learn. The value of the first state is 0, because no target uses it.

    Args:
        params: the towers that give the state values.
        batch: the questions, with STOP if there is a STOP action.
        draws: the keys that the episodes were played with, and the temperature of the soft value.
        actions: `[B, T]`, the actions that were taken.
    """
    encoder, block_shapes, config = actor.encoder, actor.block_shapes, actor.config
    keys, alpha, _ = draws
    episodes, steps = actions.shape

    def act(state: env.ChunksState, t: jax.Array) -> tuple[env.ChunksState, tuple]:
        new = actor.step(state, batch, actions[:, t], t)
        return new, (state, new.done)

    start = env.reset(batch, config.max_steps)
    _, (states, done) = jax.lax.scan(act, start, jnp.arange(steps))  # [T, B, …]
    valid = ~states.done

    # [T, B, L], [T, B]
    tokens, lengths = jax.vmap(partial(actor.state_rows, batch))(states.taken)
    lengths = jnp.where(valid, lengths, 0)
    later = jnp.where(jnp.arange(steps)[:, None] > 0, lengths, 0)
    embedded, used_by_states = embed_rows(
        encoder,
        block_shapes.states,
        encoder.tower(params, STATE),
        TokenRows(tokens.reshape(steps * episodes, -1), later.reshape(-1)),
    )
    chunk_tokens, chunk_lengths = actor.chunk_rows(batch)
    chunks, width = chunk_tokens.shape[1:]
    all_chunks, used_by_chunks = embed_rows(
        encoder,
        block_shapes.chunks,
        encoder.tower(params, CHUNK),
        TokenRows(chunk_tokens.reshape(-1, width), chunk_lengths.reshape(-1)),
    )
    all_chunks = all_chunks.reshape(episodes, chunks, encoder.width)
    where, last = positions_of(config, batch, keys), config.last_position(chunks)

    def value(step: tuple[jax.Array, env.ChunksState, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Soft values and positions at one time, so that chunks are rotated for one at a time."""
        state_embedding, state, action = step
        position = where(state.taken)
        twin = soft_q.twin_q(state_embedding, rotate(all_chunks, position, last))
        soft = soft_q.soft_value(twin, state.available, alpha, config.top_k_actions)
        return soft, jnp.take_along_axis(position, action[:, None], 1)[:, 0]

    embedded = embedded.reshape(steps, episodes, -1)
    values, positions = jax.lax.map(value, (embedded, states, actions.T))
    values = jnp.where(later > 0, values, 0.0)
    by_episode = [
        jnp.moveaxis(leaf, 0, 1) for leaf in (valid, done, values, tokens, lengths, positions)
    ]
    valid, done, values, tokens, lengths, positions = by_episode
    rows = jnp.arange(episodes)[:, None]
    empty = jnp.zeros((episodes, 0))
    return Trajectory(
        actions=actions,
        q=empty,
        first_q=empty,
        entropy=empty,
        state_embeddings=empty,
        chunk_embeddings=empty,
        valid=valid,
        done=done,
        values=values,
        state_tokens=tokens,
        state_lengths=lengths,
        chunk_tokens=chunk_tokens[rows, actions],
        chunk_lengths=jnp.where(valid, chunk_lengths[rows, actions], 0),
        positions=positions,
        tokens=TokenCount.total([used_by_states, used_by_chunks]),
    )

"""Plays episodes with a two-tower soft-Q policy over the chunks of many documents at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, check_steps
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments import chunks as env
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import chunk_width, state_width
from qrag_jax.errors import InputError
from qrag_jax.models.compute.attention import rotate
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.ragged import BlockShapes, TokenRows, embed_rows
from qrag_jax.models.embedding import Params, TextEncoder
from qrag_jax.policies import soft_q

STATE, CHUNK = 0, 1  # order of the towers on the leading axis of the parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(env.ChunksConfig):
    max_chunk_tokens: int  # longest chunk row, special tokens counted
    max_chunk_tokens_in_state: int  # tokens of a chunk kept inside a state
    # number of best actions that the policy draws from and the soft value sums over
    top_k_actions: int

    def last_position(self, columns: int) -> int:
        """The highest position in a batch with this many columns."""
        return positions.last_position(self.positions, columns, self.max_steps)


@dataclasses.dataclass(frozen=True)
class Actor:
    """All that plays episodes except the parameters; hashable, so it can be static in `jax.jit`."""

    encoder: TextEncoder
    block_shapes: BlockShapes
    config: RolloutConfig

    def on(self, mesh: Mesh) -> Actor:
        return dataclasses.replace(self, encoder=self.encoder.on(mesh))

    def state_rows(self, batch: EpisodeBatch, taken: jax.Array) -> TokenRows:
        """The states after taking the chunks `[B, T]`: tokens `[B, L]`, lengths `[B]`."""
        config, before = self.config, taken[:, : self.config.max_steps - 1]
        kept, by_index = config.max_chunk_tokens_in_state, config.sort_by_index
        return TokenRows(
            *env.state_rows(batch, before, self.encoder, chunk_tokens=kept, sort_by_index=by_index)
        )

    def chunk_rows(self, batch: EpisodeBatch) -> TokenRows:
        """All chunks of every document: tokens `[B, C, W]`, lengths `[B, C]`."""
        most = self.config.max_chunk_tokens
        return TokenRows(*env.chunk_rows(batch, self.encoder, row_tokens=most))

    def playable(self, batch: EpisodeBatch) -> EpisodeBatch:
        """The batch as it is played: with STOP as one more chunk, if there is that action."""
        return env.with_stop(batch) if self.config.stop_action else batch


class Draws(NamedTuple):
    keys: jax.Array | None  # `[B]` PRNG keys, one per episode; None acts greedily
    alpha: jax.Array  # temperature of the policy and of the soft value
    uniform: jax.Array | bool = False  # scalar bool; True acts uniformly at random instead
    # Of each parameter set the dropout keys `[2]` of its towers; None: it drops nothing
    dropout: tuple[jax.Array | None, ...] = (None, None)

    @classmethod
    def greedy(cls) -> Draws:
        return cls(None, jnp.float32(1.0))


class Trajectory(NamedTuple):
    """Played episodes; T steps, D the embedding's width. Online is the set that acts."""

    actions: jax.Array  # `[B, T]`, the actions taken
    valid: jax.Array  # `[B, T]`, whether the step happened
    q: jax.Array  # `[B, T]`, online Q of the action taken
    # `[B, C]`, online Q of every chunk at reset, `MASKED` where there is no chunk
    first_q: jax.Array
    entropy: jax.Array  # `[B, T]`, of the acting policy, in nats
    values: jax.Array  # `[B, T]`, soft value of the state acted in, by the last parameter set
    # What the update encodes again: tokens `[B, T, …]`, lengths `[B, T]`, 0 where not valid
    states: TokenRows
    chunks: TokenRows  # those taken
    state_embeddings: jax.Array  # `[B, T, D]`, online, of each state
    chunk_embeddings: jax.Array  # `[B, T, D]`, online, of each chunk taken, before rotation
    # `[B, T]`, position of the chunk taken, at which it was rotated for the policy
    positions: jax.Array
    tokens: jax.Array  # `[2]`, text tokens and computed tokens of the rollout


def rollout(
    actor: Actor,
    params: Sequence[Params | Adapted],
    batch: EpisodeBatch,
    draws: Draws,
    actions: jax.Array | None = None,
) -> Trajectory:
    """Plays whole episodes.

    Of the parameter sets, each of two towers, the first acts (online), and the last gives the state
    values (target). With `actions` `[B, T]` these are taken again, with the draws of then.
    """
    encoder, config = actor.encoder, actor.config
    keys, alpha, uniform, dropout = draws
    towers = [
        [(encoder.tower(p, i), None if k is None else k[i]) for p, k in zip(params, dropout)]
        for i in (STATE, CHUNK)
    ]
    rows = actor.chunk_rows(batch)
    chunks, used_by_chunks = _embedded(actor, CHUNK, towers[CHUNK], rows.flat)
    chunks = chunks.reshape(-1, *rows.lengths.shape, encoder.width)
    last = config.last_position(batch.chunk_mask.shape[1])
    where = positions_of(config, batch, keys)

    def act(state: env.ChunksState, t: jax.Array) -> tuple[env.ChunksState, tuple]:
        tokens, lengths = actor.state_rows(batch, state.taken)
        valid = ~state.done
        state_rows = TokenRows(tokens, jnp.where(valid, lengths, 0))
        states, used = _embedded(actor, STATE, towers[STATE], state_rows)
        position = where(state.taken)
        twin = soft_q.twin_q(states, rotate(chunks, position[None], last))  # [roles, B, C, 2]
        q = jnp.where(state.available, twin[0].sum(-1), soft_q.MASKED)
        log_policy = soft_q.log_policy(q, state.available, alpha, config.top_k_actions)
        log_policy = jnp.where(uniform, soft_q.log_uniform(state.available), log_policy)
        if actions is not None:
            action = actions[:, t]
        elif keys is None:
            action = q.argmax(-1)
        else:
            step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
            action = jax.vmap(jax.random.categorical)(step_keys, log_policy)
        new_state = env.step(state, batch, action, t, config)
        value = soft_q.soft_value(twin[-1], state.available, alpha, config.top_k_actions)
        step = {
            "actions": action,
            "valid": valid,
            "q": jnp.where(valid, jnp.take_along_axis(q, action[:, None], 1)[:, 0], 0.0),
            "entropy": jnp.where(valid, soft_q.entropy(log_policy), 0.0),
            "values": jnp.where(valid, value, 0.0),
            "states": state_rows,
            "state_embeddings": states[0],
            "positions": jnp.take_along_axis(position, action[:, None], 1)[:, 0],
        }
        return new_state, (step, q, used)

    _, (by_time, q, used_by_states) = jax.lax.scan(
        act, env.reset(batch, config.max_steps), jnp.arange(config.max_steps)
    )
    steps = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), by_time)
    taken, episodes = steps["actions"], jnp.arange(len(steps["actions"]))[:, None]
    lengths = jnp.where(steps["valid"], rows.lengths[episodes, taken], 0)
    return Trajectory(
        **steps,
        chunks=TokenRows(rows.tokens[episodes, taken], lengths),
        first_q=q[0],
        chunk_embeddings=chunks[0][episodes, taken],
        tokens=used_by_chunks + used_by_states.sum(axis=0),
    )


def _embedded(
    actor: Actor, tower: int, roles: Sequence[tuple[Any, Any]], rows: TokenRows
) -> tuple[jax.Array, jax.Array]:
    """N rows → `[roles, N, D]`, by one tower of each set and its key, and the tokens `[2]`."""
    shapes = actor.block_shapes
    blocks = shapes.chunks if tower == CHUNK else shapes.states
    results = [embed_rows(actor.encoder, blocks, one, rows, key) for one, key in roles]
    embedded, used = (jnp.stack(leaves) for leaves in zip(*results, strict=True))
    return embedded, used.sum(axis=0)


def positions_of(
    config: RolloutConfig, batch: EpisodeBatch, keys: jax.Array | None
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function from the chunks taken `[B, T]` to the positions `[B, C]` of all chunks."""
    episodes, columns = batch.chunk_mask.shape
    counts = batch.chunk_mask.sum(axis=1) - (1 if config.stop_action else 0)
    index = jnp.broadcast_to(jnp.arange(columns), (episodes, columns))
    # No action is drawn at time 2**31 - 1, so these draws differ from those of the actions.
    keyed = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, 2**31 - 1)
    if config.positions == "none":
        fixed = jnp.zeros_like(index)
    elif config.positions == positions.RANDOM_PUBLISHED:
        if keyed is None:
            keyed = positions.evaluation_keys(batch.question, batch.question_length)
        fixed = positions.draw_indents(keyed, counts).positions(index)
    elif config.positions != "relative":
        random = config.positions == "random"
        fixed = positions.absolute(keyed if random else None, episodes, columns)

    def where(taken: jax.Array) -> jax.Array:
        if config.positions == "relative":
            position = positions.relative(index, taken, counts)
        else:
            position = fixed
        # Padding and STOP have no position: they are not rotated.
        return jnp.where(index < counts[:, None], position, 0)

    return where


def widths_of(config: RolloutConfig, encoder: TextEncoder, shape: EpisodeShape) -> tuple[int, int]:
    """The tokens that rows of chunks and of states are padded to before they are packed."""
    in_state = min(config.max_chunk_tokens_in_state, shape.chunk_tokens)
    opening, steps = len(encoder.state_opening), config.max_steps
    chunk = chunk_width(len(encoder.chunk_opening), shape.chunk_tokens)
    state = state_width(opening, shape.question_tokens, in_state, steps - 1)
    return min(config.max_chunk_tokens, chunk), state


def check_fit(
    config: RolloutConfig,
    encoder: TextEncoder,
    shape: EpisodeShape,
    stores: Mapping[str, TokenStore],
) -> None:
    """Refuses settings whose rows do not fit the encoder, or whose episodes fit no document."""
    check_steps(config.max_steps, stores)
    positions.check_chunks(config.positions, shape.chunks)
    in_state = min(config.max_chunk_tokens_in_state, shape.chunk_tokens)
    (chunk, state), max_positions = widths_of(config, encoder, shape), encoder.max_positions
    if state > max_positions:
        raise InputError(
            f"a state can reach {state} tokens ({shape.question_tokens} of the question and "
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
    if chunk > max_positions:
        raise InputError(
            f"rows of {chunk} tokens exceed {max_positions}; lower config.data.max_chunk_tokens."
        )

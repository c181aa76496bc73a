"""PQN where rewards come from outside: one program plays, another learns once they are there.

Between the two lie K batches, so that the device is busy while a reward model thinks. A batch is
learned from by the weights of its turn, whatever weights played it: its states and chunks are
encoded again, the targets are those of the present target towers, and the loss is that of `pqn`.
With K = 0 a step is the one of `train_step` (tested), rewards being equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners import pqn
from qrag_jax.learners.step import Metrics, TrainStep, make_step
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.ragged import (
    BlockShapes,
    TokenCount,
    embed_and_pull_back,
    embed_rows,
    pull_back,
)
from qrag_jax.models.compute.rope import rotate
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.rollouts.chunks import CHUNK, STATE, RolloutConfig, rollout
from qrag_jax.rollouts.replay import replay
from qrag_jax.runtime.sharding import BATCH_AXES, gather, specs_of


class Played(NamedTuple):
    """What is kept of played episodes; T steps.

    actions `[B, T]`: chunks in the order taken, or STOP. valid `[B, T]`: the step happened.
    entropy `[B, T]` of the acting policy, in nats.
    """

    actions: jax.Array
    valid: jax.Array
    entropy: jax.Array


class ScoredEpisodes(NamedTuple):
    """Played episodes with their rewards.

    score `[B, T]` float32: reward of each step. scored `[B, T]` bool: whether the step is learned
    from. No step of an episode is whose rewards could not be had, and none behind one that an
    episode was made to end at: the last one that is learned from ends it.
    """

    batch: EpisodeBatch
    played: Played
    score: jax.Array
    scored: jax.Array


PlayStep = Callable[..., Played]  # (state, batch, number of the batch), then a base if any


def make_play_step(
    mesh: Mesh,
    shardings: pqn.TrainState,
    encoder: TextEncoder,
    block_shapes: BlockShapes,
    rollout_config: RolloutConfig,
    config: pqn.PQNConfig,
    schedule: optax.Schedule,
    peak_learning_rate: float,
    base_shardings: Params | None = None,
) -> PlayStep:
    """The jitted `(state, batch, number) → Played`, split over the mesh as the training step.

    `number` is an int32 scalar on the device: the step that will learn from the batch. It settles
    the draws; temperature, random acting and dropout are those of `state`.
    """
    drops = encoder.drops(base_shardings is not None)
    specs, base_specs = specs_of(shardings.params), specs_of(base_shardings)

    def on_device(params, base, batch, keys, alpha, uniform, dropout_key) -> Played:
        params = gather(params, specs)
        if base is not None:
            params = Adapted(gather(base, base_specs), params)
        params = pqn.with_dropout(params, dropout_key)
        if rollout_config.stop_action:
            batch = with_stop(batch)
        settings = batch, keys, alpha, uniform
        trajectory = rollout(encoder, block_shapes, rollout_config, (params,), *settings)
        return Played(trajectory.actions, trajectory.valid, trajectory.entropy)

    replicated, by_episode = PartitionSpec(), PartitionSpec(BATCH_AXES)
    over_mesh = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, base_specs, by_episode, by_episode, *[replicated] * 3),
        out_specs=by_episode,
        check_vma=False,
    )

    def play(
        state: pqn.TrainState, batch: EpisodeBatch, number: jax.Array, base: Params | None = None
    ) -> Played:
        alpha = pqn.alpha_at(config.alpha, schedule(state.step), peak_learning_rate)
        keys = pqn.episode_keys(state, number, batch.sample.shape[0])
        uniform = state.env_steps < 2 * config.learning_start
        dropout_key = pqn.dropout_key(state) if drops else None
        return over_mesh(state.params, base, batch, keys, alpha, uniform, dropout_key)

    placed = shardings, NamedSharding(mesh, by_episode), NamedSharding(mesh, replicated)
    return jax.jit(
        play,
        in_shardings=placed if base_shardings is None else (*placed, base_shardings),
        out_shardings=NamedSharding(mesh, by_episode),
    )


def make_learn_step(
    mesh: Mesh,
    shardings: pqn.TrainState,
    encoder: TextEncoder,
    block_shapes: BlockShapes,
    rollout_config: RolloutConfig,
    config: pqn.PQNConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    peak_learning_rate: float,
    accumulation: int = 1,
    base_shardings: Params | None = None,
) -> TrainStep:
    """The jitted `(state, ScoredEpisodes) → (state, metrics)`; the state's buffers are donated.

    Metrics are those of `make_train_step`, over the scored episodes, and `unscored_share`, of the
    others among all. `padding_share` is of this program.
    """
    sums_of = partial(gradient_sums, encoder, block_shapes, rollout_config, config)
    drops = encoder.drops(base_shardings is not None)

    def with_share(episodes: ScoredEpisodes, metrics: Metrics) -> Metrics:
        present = episodes.batch.chunk_mask.any(axis=1)
        lost = (present & ~episodes.scored.any(axis=1)).sum() / jnp.maximum(present.sum(), 1)
        return metrics | {"unscored_share": lost.astype(jnp.float32)}

    return make_step(
        mesh,
        shardings,
        sums_of,
        config,
        optimizer,
        schedule,
        peak_learning_rate,
        accumulation,
        drops,
        base_shardings,
        with_share,
    )


def gradient_sums(
    encoder: TextEncoder,
    block_shapes: BlockShapes,
    rollout_config: RolloutConfig,
    config: pqn.PQNConfig,
    params: Params | Adapted,
    target_params: Params | Adapted,
    episodes: ScoredEpisodes,
    keys: jax.Array,
    alpha: jax.Array,
    uniform: jax.Array,
    dropout_key: jax.Array | None = None,
) -> tuple[Params, pqn.Sums]:
    """As `pqn.gradient_sums`, from episodes that are played and scored.

    Args:
        keys: those that the episodes were played with. uniform: not used, the play is over.
    """
    batch = episodes.batch
    if rollout_config.stop_action:
        batch = with_stop(batch)
    actions = episodes.played.actions
    target_params = pqn.target_with_dropout(target_params, dropout_key)
    played = replay(
        encoder, block_shapes, rollout_config, target_params, batch, keys, alpha, actions
    )
    valid = played.valid & episodes.scored
    rewards = jnp.where(valid, episodes.score, 0.0)
    ends = ~jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    target = pqn.targets(played._replace(done=played.done | ends), rewards, config)
    params, goals = pqn.with_dropout(params, dropout_key), target.reshape(-1)
    flat, last = valid.reshape(-1), rollout_config.last_position(batch.chunk_mask.shape[1])

    def rows(tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tokens.reshape(-1, tokens.shape[-1]), jnp.where(flat, lengths.reshape(-1), 0)

    chunk_rows = rows(played.chunk_tokens, played.chunk_lengths)
    state_rows = rows(played.state_tokens, played.state_lengths)
    # The chunks' embeddings first: with them a state's cotangent is known as soon as the state is
    # embedded, so that chosen chunks alone are encoded once more than with stored embeddings.
    chunks, used_by_chunks = embed_rows(
        encoder, block_shapes.gradients, encoder.tower(params, CHUNK), *chunk_rows
    )
    chunks = chunks.reshape(*valid.shape, -1)
    rotated = rotate(chunks, played.positions, last).reshape(len(flat), -1)

    def of_states(embedded: jax.Array, row: jax.Array) -> jax.Array:
        def loss_of(states: jax.Array) -> jax.Array:
            chosen, goal = (
                array.at[row].get(mode="fill", fill_value=0) for array in (rotated, goals)
            )
            is_valid = flat.at[row].get(mode="fill", fill_value=False)
            return pqn.loss(states, chosen, goal, is_valid)[0]

        return jax.grad(loss_of)(embedded)

    of_state_tower, states, used_by_states = embed_and_pull_back(
        encoder, block_shapes.gradients, _tower(params, STATE), *state_rows, of_states
    )
    states = states.reshape(*valid.shape, -1)

    def loss_of(chunks: jax.Array) -> jax.Array:
        return pqn.loss(states, rotate(chunks, played.positions, last), target, valid)[0]

    total, cotangents = jax.value_and_grad(loss_of)(chunks)
    of_chunk_tower, used_again = pull_back(
        encoder,
        block_shapes.gradients,
        _tower(params, CHUNK),
        *chunk_rows,
        cotangents.reshape(len(flat), -1),
    )
    gradient = jax.tree.map(lambda *towers: jnp.stack(towers), of_state_tower, of_chunk_tower)
    learned = played._replace(
        valid=valid,
        q=(states * rotated.reshape(states.shape)).sum(axis=-1),
        entropy=episodes.played.entropy,
    )
    tokens = TokenCount.total([played.tokens, used_by_chunks, used_by_states, used_again])
    return gradient, pqn.sums_of(batch, learned, rewards, target, total, tokens)


def _tower(params: Params | Adapted, number: int) -> Params | Adapted:
    """One of the two; of adapters, with its key of dropout."""
    if not isinstance(params, Adapted):
        return jax.tree.map(lambda leaf: leaf[number], params)
    own = params.adapters, params.dropout_key
    return Adapted(params.base, *jax.tree.map(lambda leaf: leaf[number], own))

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

from qrag_jax.algorithms import pqn
from qrag_jax.algorithms.rollout import RolloutConfig, rollout
from qrag_jax.algorithms.train_step import Metrics, TrainStep, make_step
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.encoders.lora import Adapted, attach
from qrag_jax.encoders.ragged import Plan, TokenCount, embed_rows
from qrag_jax.encoders.rope import rotate
from qrag_jax.encoders.text_encoder import Params, TextEncoder
from qrag_jax.environments.chunks import with_stop
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

    score `[B]` float32: reward of an episode's last step. scored `[B]` bool: whether it could be
    had; other episodes are left out of the update.
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
    plan: Plan,
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
    drops = base_shardings is not None and encoder.lora_dropout > 0
    specs, base_specs = specs_of(shardings.params), specs_of(base_shardings)

    def on_device(params, base, batch, keys, alpha, uniform, dropout_key) -> Played:
        params = gather(params, specs)
        if base is not None:
            params = pqn.with_dropout(Adapted(gather(base, base_specs), params), dropout_key)
        if rollout_config.stop_action:
            batch = with_stop(batch)
        settings = batch, keys, alpha, uniform
        trajectory = rollout(encoder, plan, rollout_config, (params,), *settings)
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
    plan: Plan,
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
    sums_of = partial(gradient_sums, encoder, plan, rollout_config, config)
    drops = base_shardings is not None and encoder.lora_dropout > 0

    def with_share(episodes: ScoredEpisodes, metrics: Metrics) -> Metrics:
        present = episodes.batch.chunk_mask.any(axis=1)
        lost = (present & ~episodes.scored).sum() / jnp.maximum(present.sum(), 1)
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
    plan: Plan,
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
    trajectory = rollout(
        encoder,
        plan,
        rollout_config,
        (target_params,),
        batch,
        keys,
        alpha,
        actions=episodes.played.actions,
    )
    valid = trajectory.valid & episodes.scored[:, None]
    trajectory = trajectory._replace(
        valid=valid,
        entropy=episodes.played.entropy,
        state_lengths=jnp.where(valid, trajectory.state_lengths, 0),
        chunk_lengths=jnp.where(valid, trajectory.chunk_lengths, 0),
    )
    params = pqn.with_dropout(params, dropout_key)

    def of_tower(tower: tuple) -> tuple[jax.Array, TokenCount]:
        one, tokens, lengths = tower
        if isinstance(one, Adapted):
            one = attach(one, encoder.lora_scale)
        return embed_rows(encoder, plan.gradients, one, tokens, lengths)

    embedded, used = pqn.over_towers(of_tower, params, pqn.tower_rows(trajectory))
    states, chunks = embedded.reshape(2, *valid.shape, encoder.width)
    last = rollout_config.last_position(batch.chunk_mask.shape[1])
    q = (states * rotate(chunks, trajectory.positions, last)).sum(axis=-1)
    trajectory = trajectory._replace(
        state_embeddings=states,
        chunk_embeddings=chunks,
        q=jnp.where(valid, q, 0.0),
        tokens=TokenCount.total([trajectory.tokens, used]),
    )
    rewards = jnp.where(valid & trajectory.done, episodes.score[:, None], 0.0)
    return pqn.regress(encoder, plan, rollout_config, config, params, batch, trajectory, rewards)

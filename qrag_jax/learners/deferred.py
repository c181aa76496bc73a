"""PQN with rewards from outside: one program plays, another one learns once the rewards are there.

K batches lie between the two, so that the device is busy while a reward model works. Learning uses
the current weights, not those that played the batch: its states and chunks are encoded again, the
targets come from the current target towers, and the loss is that of `pqn`. With K = 0 and the same
rewards, a step equals that of `learners.step` (tested).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.algorithms.pqn import loss
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners.pqn import (
    PQNConfig,
    Sums,
    Towers,
    sums_of,
    target_with_dropout,
    with_dropout,
)
from qrag_jax.learners.state import TrainState, dropout_key
from qrag_jax.learners.step import Metrics, TrainStep, make_step
from qrag_jax.learners.two_towers import TwoTowers
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.ragged import (
    CotangentsOf,
    TokenCount,
    TokenRows,
    embed_and_pull_back,
    embed_rows,
    pull_back,
)
from qrag_jax.models.compute.rope import rotate
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, rollout
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.rollouts.replay import replay
from qrag_jax.runtime.platform import compiler_options
from qrag_jax.runtime.sharding import BATCH_AXES, specs_of

PlayStep = Callable[..., Played]  # (state, batch, number of the batch), then a base if any


def make_play_step(towers: TwoTowers) -> PlayStep:
    """Makes the jitted `(state, batch, number) → Played`, split over the mesh as the training step.

    `number` is an int32 scalar on the device: the number of the step that will learn from the
    batch. It determines the draws. Temperature, random acting and dropout are those of `state`.
    """
    mesh, shardings, actor = towers.mesh, towers.shardings, towers.actor
    base_shardings = towers.base_shardings
    specs, base_specs = specs_of(shardings.params), specs_of(base_shardings)

    def on_device(params, base, batch, draws: Draws, dropout_key) -> Played:
        if base is not None:
            params = Adapted(base, params)
        params = with_dropout(params, dropout_key)
        if actor.config.stop_action:
            batch = with_stop(batch)
        trajectory = rollout(actor, (params,), batch, draws)
        return Played(trajectory.actions, trajectory.valid, trajectory.entropy)

    replicated, by_episode = PartitionSpec(), PartitionSpec(BATCH_AXES)
    over_mesh = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(
            specs,
            base_specs,
            by_episode,
            Draws.specs(),
            replicated,
        ),
        out_specs=by_episode,
        check_vma=False,
    )

    def play(
        state: TrainState, batch: EpisodeBatch, number: jax.Array, base: Params | None = None
    ) -> Played:
        draws = towers.draws(state, number, batch.sample.shape[0])
        key = dropout_key(state) if towers.drops else None
        return over_mesh(state.params, base, batch, draws, key)

    placed = shardings, NamedSharding(mesh, by_episode), NamedSharding(mesh, replicated)
    return jax.jit(
        play,
        in_shardings=placed if base_shardings is None else (*placed, base_shardings),
        out_shardings=NamedSharding(mesh, by_episode),
        compiler_options=compiler_options(mesh, adapters=base_shardings is not None),
    )


def make_learn_step(towers: TwoTowers) -> TrainStep:
    """Makes the jitted `(state, ScoredEpisodes) → (state, metrics)`.

    The state's buffers are donated. Metrics are those of `make_train_step` over the scored
    episodes, and `unscored_share`, the share of episodes without rewards. `padding_share` is that
    of this program alone.
    """

    def with_share(episodes: ScoredEpisodes, metrics: Metrics) -> Metrics:
        present = episodes.batch.chunk_mask.any(axis=1)
        lost = (present & ~episodes.scored.any(axis=1)).sum() / jnp.maximum(present.sum(), 1)
        return metrics | {"unscored_share": lost.astype(jnp.float32)}

    return make_step(towers, ScoredGradient(towers.actor, towers.config), with_share)


@dataclasses.dataclass(frozen=True)
class ScoredGradient:
    """As `pqn.FusedGradient`, for episodes that are already played and scored."""

    actor: Actor
    config: PQNConfig

    def __call__(
        self, towers: Towers, episodes: ScoredEpisodes, draws: Draws, dropout_key: jax.Array | None
    ) -> tuple[Params, Sums]:
        """The gradient of the online towers, and the sums.

        Args:
            draws: the keys that the episodes were played with, and the temperature; `uniform` is
                not used, because the play is over.
        """
        actor, config = self.actor, self.config
        encoder, block_shapes, rollout_config = actor.encoder, actor.block_shapes, actor.config
        batch = episodes.batch
        if rollout_config.stop_action:
            batch = with_stop(batch)
        actions = episodes.played.actions
        target_params = target_with_dropout(towers.target, dropout_key)
        played = replay(actor, target_params, batch, draws, actions)
        valid = played.valid & episodes.scored
        rewards = jnp.where(valid, episodes.score, 0.0)
        ends = ~jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
        target = config.targets(played._replace(done=played.done | ends), rewards)
        params, goals = with_dropout(towers.online, dropout_key), target.reshape(-1)
        flat, last = valid.reshape(-1), rollout_config.last_position(batch.chunk_mask.shape[1])

        def rows(tokens: jax.Array, lengths: jax.Array) -> TokenRows:
            lengths = jnp.where(flat, lengths.reshape(-1), 0)
            return TokenRows(tokens.reshape(-1, tokens.shape[-1]), lengths)

        chunk_rows = rows(played.chunk_tokens, played.chunk_lengths)
        state_rows = rows(played.state_tokens, played.state_lengths)
        # Chunks are embedded first. Then the cotangent of a state is known as soon as the state is
        # embedded, so states are encoded once, and only the chosen chunks twice.
        chunks, used_by_chunks = embed_rows(
            encoder, block_shapes.gradients, encoder.tower(params, CHUNK), chunk_rows
        )
        chunks = chunks.reshape(*valid.shape, -1)
        rotated = rotate(chunks, played.positions, last).reshape(len(flat), -1)

        def of_states(embedded: jax.Array, values: tuple[jax.Array, ...]) -> jax.Array:
            return jax.grad(lambda states: loss(states, *values)[0])(embedded)

        of_state_tower, states, used_by_states = embed_and_pull_back(
            encoder,
            block_shapes.gradients,
            _tower(params, STATE),
            state_rows,
            CotangentsOf(of_states, (rotated, goals, flat)),
        )
        states = states.reshape(*valid.shape, -1)

        def loss_of(chunks: jax.Array) -> jax.Array:
            return loss(states, rotate(chunks, played.positions, last), target, valid)[0]

        total, cotangents = jax.value_and_grad(loss_of)(chunks)
        of_chunk_tower, used_again = pull_back(
            encoder,
            block_shapes.gradients,
            _tower(params, CHUNK),
            chunk_rows,
            cotangents.reshape(len(flat), -1),
        )
        gradient = jax.tree.map(lambda *towers: jnp.stack(towers), of_state_tower, of_chunk_tower)
        learned = played._replace(
            valid=valid,
            q=(states * rotated.reshape(states.shape)).sum(axis=-1),
            entropy=episodes.played.entropy,
        )
        tokens = TokenCount.total([played.tokens, used_by_chunks, used_by_states, used_again])
        return gradient, sums_of(batch, learned, rewards, target, loss=total, tokens=tokens)


def scored_shapes(batch: EpisodeBatch, steps: int) -> ScoredEpisodes:
    """Shapes and dtypes of the scored episodes of a batch, which is given as shapes too."""

    def of(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((batch.sample.shape[0], steps), dtype)

    played = Played(of(jnp.int32), of(jnp.bool_), of(jnp.float32))
    return ScoredEpisodes(batch, played, of(jnp.float32), of(jnp.bool_))


def _tower(params: Params | Adapted, number: int) -> Params | Adapted:
    """The parameters of one of the two towers; adapters keep their dropout key."""
    if not isinstance(params, Adapted):
        return jax.tree.map(lambda leaf: leaf[number], params)
    own = params.adapters, params.dropout_key
    return Adapted(params.base, *jax.tree.map(lambda leaf: leaf[number], own))

"""PQN with λ-returns and twin soft Q-values (Gallici et al., arXiv 2407.04811; Q-RAG, 2511.07328).

Where rewards are computed on the device, one update plays whole episodes with the current weights,
scores them, forms λ-returns with the values of the target towers, and regresses both critics on
them. The loss depends on the towers only through the embeddings. So its gradient with respect to
the embeddings is computed first, and then pulled back through each tower in length-sorted blocks:
only the states and the chosen chunks are encoded with gradients. Where rewards come from outside,
episodes are played before, and learned from here with the current weights: states and chunks are
encoded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.algorithms.pqn import loss, targets
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners.config import PQNConfig
from qrag_jax.models.compute.dropout import with_key
from qrag_jax.models.compute.lora import Adapted, of_tower
from qrag_jax.models.compute.ragged import (
    TokenCount,
    TokenRows,
    embed_and_pull_back,
    embed_rows,
    pull_back,
)
from qrag_jax.models.compute.rope import rotate
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, Trajectory, replay, rollout
from qrag_jax.rollouts.experience import ScoredEpisodes

# (batch, trajectory, of which it reads `actions` and `valid`) → rewards `[B, T]`
Feedback = Callable[[EpisodeBatch, Any], jax.Array]


class Towers(NamedTuple):
    """Online and target parameters: two towers stacked on axis 0, or adapters over one base."""

    online: Params | Adapted
    target: Params | Adapted


class Sums(NamedTuple):
    """Totals of a batch: divide by a count to get a mean.

    Attributes:
        loss: of transitions.
        transitions, episodes: their numbers; of imitation, states and none.
        by_transition, by_episode: what else is summed, by the names of the means.
        tokens: that were computed.
    """

    loss: jax.Array
    transitions: jax.Array
    episodes: jax.Array
    by_transition: dict[str, jax.Array]
    by_episode: dict[str, jax.Array]
    tokens: TokenCount

    def means(self) -> dict[str, jax.Array]:
        """Means over transitions and over episodes."""
        transitions = jnp.maximum(self.transitions, 1.0)
        episodes = jnp.maximum(self.episodes, 1.0)
        return {
            "loss": self.loss / transitions,
            **{name: total / transitions for name, total in self.by_transition.items()},
            **{name: total / episodes for name, total in self.by_episode.items()},
        }


@dataclasses.dataclass(frozen=True)
class FusedGradient:
    """Plays a batch and gives the gradient of the SUMMED loss, with the sums to divide by."""

    actor: Actor
    config: PQNConfig
    feedback: Feedback

    def __call__(
        self, towers: Towers, batch: EpisodeBatch, draws: Draws, dropout_key: jax.Array | None
    ) -> tuple[Params, Sums]:
        """The gradient of the online towers, and the sums.

        For towers that share a frozen base (`Adapted`) it is the gradient of their adapters. With a
        `dropout_key` the masks of `models.compute.dropout` apply to the online towers, or to the
        inputs of their adapters. Play and learning use the same masks, so the policy acts on the
        same embeddings that are regressed, and dropout adds to its exploration. The target towers
        have masks of their own, as in Q-RAG, where all towers stay in torch's training mode. Target
        adapters drop nothing.

        With τ = 1 and no dropout the target towers are the online ones, and encode nothing.
        """
        encoder, rollout_config = self.actor.encoder, self.actor.config
        if rollout_config.stop_action:
            batch = with_stop(batch)
        params = with_dropout(towers.online, dropout_key)
        target_params = with_dropout(towers.target, dropout_key, target=True)
        same = self.config.tau == 1 and dropout_key is None
        sets = (params,) if same else (params, target_params)
        trajectory = rollout(self.actor, sets, batch, draws)
        rewards = self.feedback(batch, trajectory)
        discounts = self.config.gamma, self.config.lambda_
        target = targets(rewards, trajectory.done, trajectory.values, *discounts)
        embeddings = (trajectory.state_embeddings, trajectory.chunk_embeddings)
        last = rollout_config.last_position(batch.chunk_mask.shape[1])

        def loss_of(states: jax.Array, chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
            return loss(
                states, rotate(chunks, trajectory.positions, last), target, trajectory.valid
            )

        (total, _), cotangents = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(*embeddings)
        rows = tower_rows(
            TokenRows(trajectory.state_tokens, trajectory.state_lengths),
            TokenRows(trajectory.chunk_tokens, trajectory.chunk_lengths),
        )
        cotangents = jnp.stack([c.reshape(-1, encoder.width) for c in cotangents])
        gradient, used = pull_back_both(self.actor, params, rows, cotangents)
        tokens = TokenCount.total([trajectory.tokens, used])
        return gradient, sums_of(batch, trajectory, rewards, target, loss=total, tokens=tokens)


@dataclasses.dataclass(frozen=True)
class ScoredGradient:
    """As `FusedGradient`, for episodes that are already played and scored."""

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
        target_params = with_dropout(towers.target, dropout_key, target=True)
        played = replay(actor, target_params, batch, draws, actions)
        valid = played.valid & episodes.scored
        rewards = jnp.where(valid, episodes.score, 0.0)
        ends = ~jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
        target = targets(rewards, played.done | ends, played.values, config.gamma, config.lambda_)
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
            of_tower(params, STATE),
            state_rows,
            of_states,
            of_rows=(rotated, goals, flat),
        )
        states = states.reshape(*valid.shape, -1)

        def loss_of(chunks: jax.Array) -> jax.Array:
            return loss(states, rotate(chunks, played.positions, last), target, valid)[0]

        total, cotangents = jax.value_and_grad(loss_of)(chunks)
        of_chunk_tower, used_again = pull_back(
            encoder,
            block_shapes.gradients,
            of_tower(params, CHUNK),
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


def with_dropout(
    params: Params | Adapted, key: jax.Array | None, *, target: bool = False
) -> Params | Adapted:
    """Towers, or their adapters, each with its own dropout key made from the key of this step.

    Target towers have other keys than online ones; target adapters get none and drop nothing.
    """
    if key is None:
        return params
    if isinstance(params, Adapted):
        return params if target else params._replace(dropout_key=jax.random.split(key, 2))
    return with_key(params, jax.random.split(key, (2, 2))[int(target)])


def sums_of(
    batch: EpisodeBatch,
    trajectory: Trajectory,
    rewards: jax.Array,
    target: jax.Array,
    *,
    loss: jax.Array,
    tokens: TokenCount,
) -> Sums:
    """The sums over valid steps; `loss` is summed already.

    Only `actions`, `valid`, `q` and `entropy` of the trajectory are read.
    """
    present = batch.chunk_mask.any(axis=1) & trajectory.valid.any(axis=1)
    unsolved = batch.support.at[
        jnp.arange(present.shape[0])[:, None],
        jnp.where(trajectory.valid, trajectory.actions, batch.support.shape[1]),
    ].set(False, mode="drop")

    def over_transitions(values: jax.Array) -> jax.Array:
        return jnp.where(trajectory.valid, values, 0.0).sum()

    return Sums(
        loss=loss,
        transitions=trajectory.valid.sum().astype(jnp.float32),
        episodes=present.sum().astype(jnp.float32),
        by_transition={
            "mean_q": over_transitions(trajectory.q),
            "mean_target": over_transitions(target),
            "td_error": over_transitions(jnp.abs(trajectory.q - target)),
            "entropy": over_transitions(trajectory.entropy),
        },
        by_episode={
            "return": over_transitions(rewards),
            "fact_em": (present & ~unsolved.any(axis=1)).sum().astype(jnp.float32),
        },
        tokens=tokens,
    )


def over_towers(
    compute: Callable[[tuple], Any], params: Params | Adapted, rows: tuple[Any, ...]
) -> Any:
    """Calls `compute((tower, *rows))` for each of the two towers; it is compiled once.

    Args:
        params: whole towers, or adapters on one base, stacked on axis 0.
        rows: what else each tower's call needs, stacked on axis 0.
    """
    if not isinstance(params, Adapted):
        return jax.lax.map(compute, (params, *rows))

    def of_adapters(tower: tuple) -> Any:
        adapters, key, *own = tower
        return compute((Adapted(params.base, adapters, key), *own))

    return jax.lax.map(of_adapters, (params.adapters, params.dropout_key, *rows))


def pull_back_both(
    actor: Actor, params: Params | Adapted, rows: TokenRows, cotangents: jax.Array
) -> tuple[Params, TokenCount]:
    """The gradient of both towers from that of their embeddings `[2, N, D]`."""

    def of_tower(tower: tuple) -> tuple[Params, TokenCount]:
        return pull_back(actor.encoder, actor.block_shapes.gradients, *tower)

    return over_towers(of_tower, params, (rows, cotangents))


def tower_rows(states: TokenRows, chunks: TokenRows) -> TokenRows:
    """States and chunks as as many rows of one width: tokens `[2, N, L]`, lengths `[2, N]`.

    Args:
        states, chunks: tokens `[..., W]`, lengths `[...]`; the fewer rows are filled up with absent
            ones.
    """
    width = max(states.tokens.shape[-1], chunks.tokens.shape[-1])
    count = max(states.lengths.size, chunks.lengths.size)

    def rows(tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, lengths = tokens.reshape(-1, tokens.shape[-1]), lengths.reshape(-1)
        more = count - len(lengths)
        widened = jnp.pad(tokens, ((0, more), (0, width - tokens.shape[1])))
        return widened, jnp.pad(lengths, (0, more))

    pairs = zip(rows(*states), rows(*chunks), strict=True)
    return TokenRows(*(jnp.stack(pair) for pair in pairs))

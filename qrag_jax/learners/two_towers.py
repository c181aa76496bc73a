"""PQN of two towers: λ-returns and twin soft Q-values (Gallici et al., arXiv 2407.04811; Q-RAG,
2511.07328).

Where rewards are computed on the device, ONE program plays whole episodes with the current weights,
scores them, forms λ-returns with the values of the target towers, and regresses both critics on
them. The loss depends on the towers only through the embeddings, so its gradient with respect to
these is pulled back through each tower in blocks: only the states and the chosen chunks are encoded
with gradients.

Where rewards come from outside, one program plays, and another one learns K batches later, by the
current weights: states and chunks are encoded again. With K = 0 and the same rewards both ways are
equal (tested).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from qrag_jax.algorithms.advantages import ends_of, gae
from qrag_jax.algorithms.two_towers import alpha_at, pqn_loss
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.learners.config import PQNConfig
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.state import TrainState, dropout_key, episode_keys
from qrag_jax.learners.update import (
    REPLICATED,
    Learner,
    Sums,
    Update,
    added,
    counted,
    padding_share,
)
from qrag_jax.models.compute.lora import Adapted, merge, of_tower, with_key
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
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.runtime.mesh import BATCH_AXES

PlayStep = Callable[..., Played]  # (state, batch, number of the batch), then a base if any
_BY_EPISODE = PartitionSpec(BATCH_AXES)
# (batch, trajectory, of which it reads `actions` and `valid`) → rewards `[B, T]`
Feedback = Callable[[EpisodeBatch, Any], jax.Array]


class Towers(NamedTuple):
    """Online and target parameters: two towers stacked on axis 0, or adapters over one base."""

    online: Params | Adapted
    target: Params | Adapted


@dataclasses.dataclass(frozen=True)
class FusedGradient:
    """Plays a batch and gives the gradient of the SUMMED loss, with the sums to divide by."""

    actor: Actor
    config: PQNConfig
    feedback: Feedback

    def __call__(
        self, towers: Towers, batch: EpisodeBatch, draws: Draws, dropout_key: jax.Array | None
    ) -> tuple[Params, Sums]:
        """The gradient of the online towers, or of their adapters, and the sums.

        Play and learning use the same dropout masks, so the policy acts on the same embeddings that
        are regressed, and dropout adds to its exploration. Target towers have masks of their own,
        as in Q-RAG, where all towers stay in torch's training mode; target adapters drop nothing.
        With τ = 1 and no dropout the target towers are the online ones, and encode nothing.
        """
        batch = self.actor.playable(batch)
        params = with_dropout(towers.online, dropout_key)
        target_params = with_dropout(towers.target, dropout_key, target=True)
        same = self.config.tau == 1 and dropout_key is None
        sets = (params,) if same else (params, target_params)
        trajectory = rollout(self.actor, sets, batch, draws)
        rewards, valid = self.feedback(batch, trajectory), trajectory.valid
        target = lambda_returns(self.config, rewards, trajectory.values, valid)
        embeddings = (trajectory.state_embeddings, trajectory.chunk_embeddings)
        last = self.actor.config.last_position(batch.chunk_mask.shape[1])

        def loss_of(states: jax.Array, chunks: jax.Array) -> jax.Array:
            return pqn_loss(states, rotate(chunks, trajectory.positions, last), target, valid)

        total, cotangents = jax.value_and_grad(loss_of, (0, 1))(*embeddings)
        rows = tower_rows(trajectory.states, trajectory.chunks)
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
        """See `FusedGradient`; `draws` has the keys that the episodes were played with."""
        actor, config = self.actor, self.config
        encoder, blocks = actor.encoder, actor.block_shapes.gradients
        batch, actions = actor.playable(episodes.batch), episodes.played.actions
        target_params = with_dropout(towers.target, dropout_key, target=True)
        played = replay(actor, target_params, batch, draws, actions)
        valid = played.valid & episodes.scored
        rewards = jnp.where(valid, episodes.score, 0.0)
        target = lambda_returns(config, rewards, played.values, valid)
        params, goals = with_dropout(towers.online, dropout_key), target.reshape(-1)
        flat, last = valid.reshape(-1), actor.config.last_position(batch.chunk_mask.shape[1])

        state_rows, chunk_rows = (
            rows._replace(lengths=jnp.where(valid, rows.lengths, 0)).flat
            for rows in (played.states, played.chunks)
        )
        # Chunks are embedded first. Then the cotangent of a state is known as soon as the state is
        # embedded, so states are encoded once, and only the chosen chunks twice.
        chunk_tower = encoder.tower(params, CHUNK)
        chunks, used_by_chunks = embed_rows(encoder, blocks, chunk_tower, chunk_rows)
        chunks = chunks.reshape(*valid.shape, -1)
        rotated = rotate(chunks, played.positions, last).reshape(len(flat), -1)

        def of_states(embedded: jax.Array, values: tuple[jax.Array, ...]) -> jax.Array:
            return jax.grad(pqn_loss)(embedded, *values)

        state_tower, values = of_tower(params, STATE), (rotated, goals, flat)
        of_state_tower, states, used_by_states = embed_and_pull_back(
            encoder, blocks, state_tower, state_rows, of_states, of_rows=values
        )
        states = states.reshape(*valid.shape, -1)

        def loss_of(chunks: jax.Array) -> jax.Array:
            return pqn_loss(states, rotate(chunks, played.positions, last), target, valid)

        total, cotangents = jax.value_and_grad(loss_of)(chunks)
        of_chunk_tower, used_again = pull_back(
            encoder, blocks, of_tower(params, CHUNK), chunk_rows, cotangents.reshape(len(flat), -1)
        )
        gradient = jax.tree.map(lambda *towers: jnp.stack(towers), of_state_tower, of_chunk_tower)
        learned = played._replace(
            valid=valid,
            q=(states * rotated.reshape(states.shape)).sum(axis=-1),
            entropy=episodes.played.entropy,
        )
        tokens = TokenCount.total([played.tokens, used_by_chunks, used_by_states, used_again])
        sums = sums_of(batch, learned, rewards, target, loss=total, tokens=tokens)
        present = episodes.batch.chunk_mask.any(axis=1)
        lost = (present & ~episodes.scored.any(axis=1)).sum().astype(jnp.float32)
        sums.means["unscored_share"] = lost, present.sum().astype(jnp.float32)
        return gradient, sums


def lambda_returns(
    config: PQNConfig, rewards: jax.Array, values: jax.Array, valid: jax.Array
) -> jax.Array:
    """What both critics are regressed on, `[B, T]`."""
    return gae(rewards, values, valid, ends_of(valid), (config.gamma, config.lambda_))[1]


def with_dropout(
    params: Params | Adapted, key: jax.Array | None, *, target: bool = False
) -> Params | Adapted:
    """Towers, or their adapters, each with its own dropout key made from the key of this step.

    Target towers have other keys than online ones; target adapters get none and drop nothing.
    """
    if key is None or (target and isinstance(params, Adapted)):
        return params
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

    transitions = trajectory.valid.sum().astype(jnp.float32)
    by_transition = {
        "loss": loss,
        "mean_q": over_transitions(trajectory.q),
        "mean_target": over_transitions(target),
        "td_error": over_transitions(jnp.abs(trajectory.q - target)),
        "entropy": over_transitions(trajectory.entropy),
    }
    episodes = present.sum().astype(jnp.float32)
    by_episode = {
        "return": over_transitions(rewards),
        "fact_em": (present & ~unsolved.any(axis=1)).sum().astype(jnp.float32),
    }
    means = {name: (total, transitions) for name, total in by_transition.items()}
    means |= {name: (total, episodes) for name, total in by_episode.items()}
    return Sums(loss, tokens, means, {})


def over_towers(
    compute: Callable[[tuple], Any], params: Params | Adapted, rows: tuple[Any, ...]
) -> Any:
    """Calls `compute((tower, *rows))` for each of two towers; all are stacked on axis 0."""
    if not isinstance(params, Adapted):
        return jax.lax.map(compute, (params, *rows))

    def of_adapters(tower: tuple) -> Any:
        adapters, key, *own = tower
        return compute((Adapted(params.base, adapters, key), *own))

    return jax.lax.map(of_adapters, (params.adapters, params.dropout_key, *rows))


def pull_back_both(
    actor: Actor, params: Params | Adapted, rows: TokenRows, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Params, TokenCount]:
    """The gradient of both towers from those of the states' and chunks' embeddings, `[..., D]`."""
    most, flat = rows.lengths.shape[1], [c.reshape(-1, c.shape[-1]) for c in cotangents]
    stacked = jnp.stack([jnp.pad(leaf, ((0, most - len(leaf)), (0, 0))) for leaf in flat])

    def of_tower(tower: tuple) -> tuple[Params, TokenCount]:
        return pull_back(actor.encoder, actor.block_shapes.gradients, *tower)

    return over_towers(of_tower, params, (rows, stacked))


def tower_rows(states: TokenRows, chunks: TokenRows) -> TokenRows:
    """States and chunks as as many rows of one width: tokens `[2, N, L]`, lengths `[2, N]`.

    The fewer rows are filled up with absent ones.
    """
    width = max(states.tokens.shape[-1], chunks.tokens.shape[-1])
    count = max(states.lengths.size, chunks.lengths.size)

    def filled(rows: TokenRows) -> TokenRows:
        tokens, lengths = rows.flat
        more = count - len(lengths)
        widened = jnp.pad(tokens, ((0, more), (0, width - tokens.shape[1])))
        return TokenRows(widened, jnp.pad(lengths, (0, more)))

    return jax.tree.map(lambda *both: jnp.stack(both), filled(states), filled(chunks))


# ------------------------------------------------------------------------ learner, programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowers(Learner):
    """Two towers, or adapters on one frozen base, and how they learn."""

    actor: Actor  # plays; its encoder is that of the mesh
    config: PQNConfig  # constants of PQN
    peak: float  # the highest learning rate
    accumulation: int = 1  # number of micro-batches in a step, on each device

    def __post_init__(self) -> None:
        # The encoder computes on the mesh, with the parts of parameters that lie there.
        object.__setattr__(self, "actor", self.actor.on(self.mesh))

    def imitating(self, optimizer: OptimizerConfig) -> TwoTowers:
        """As they learn in a first stage, without targets of their own."""
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, tau=1.0),
            parts=self.parts._replace(optimizer=make_optimizer(optimizer)),
            schedule=learning_rate_schedule(optimizer),
            peak=optimizer.learning_rate,
        )

    def dropout_key(self, state: TrainState) -> jax.Array | None:
        """That of the next step; None without dropout."""
        drops = self.actor.encoder.drops(self.base_shardings is not None)
        return dropout_key(state) if drops else None

    @property
    def params_shardings(self) -> Params | Adapted:
        """Where the parameters live, the frozen base included."""
        return merge(self.shardings.params, self.base_shardings)

    def draws(self, state: TrainState, number: jax.Array, episodes: int) -> Draws:
        """The draws of a batch, whose keys depend on the number of the step that learns from it.

        The first environment steps of a run act uniformly at random.
        """
        return Draws(
            episode_keys(state, number, episodes),
            alpha_at(self.config.alpha, self.schedule(state.step), self.peak),
            state.env_steps < 2 * self.config.learning_start,
        )


def make_update(towers: TwoTowers, gradient_of: Callable[..., tuple[Params, Sums]]) -> Update:
    """The program `(state, episodes) → (state, metrics)`; see `Learner.update`.

    The batch is split over the mesh and, on each device, into `accumulation` micro-batches. Losses
    are sums with their counts, every episode has its own PRNG key, and dropout masks depend on the
    step and the content of rows, so any split gives the same numbers as the whole batch.

    A kernel that is split over `fsdp` is gathered when its layer is computed, forward and backward;
    the optimizer and the target towers work on parts alone (Rajbhandari et al., arXiv 1910.02054,
    ZeRO stage 3). Layers that are split over `tensor` are computed where they are.

    Metrics are those of the gradient, `grad_norm`, `learning_rate`, `alpha`, `padding_share`,
    `env_steps` and `skipped`.

    Args:
        gradient_of: `FusedGradient`, `ScoredGradient` or `ImitationGradient`: `(towers, episodes,
            draws, dropout_key)` → the gradient of the summed loss, and sums, of which the mean
            `loss` counts the transitions.
    """
    accumulation = towers.accumulation

    def gradient(parts: Towers, episodes: Any, draws: Draws, dropout_key: jax.Array | None):
        def micro(episodes, keys):
            return gradient_of(parts, episodes, draws._replace(keys=keys), dropout_key)

        def add(total, micro_batch):
            return added(total, micro(*micro_batch)), None

        if accumulation == 1:
            return micro(episodes, draws.keys)
        devices = towers.mesh.size

        def split(leaf: jax.Array) -> jax.Array:
            """A part of the episodes of every device for each micro-batch."""
            rest = leaf.shape[1:]
            of_devices = leaf.reshape(devices, accumulation, -1, *rest).swapaxes(0, 1)
            parts = of_devices.reshape(accumulation, -1, *rest)
            placed = towers.on_mesh(PartitionSpec(None, BATCH_AXES))
            return jax.lax.with_sharding_constraint(parts, placed)

        micro_batches = jax.tree.map(split, (episodes, draws.keys))
        shapes = jax.eval_shape(micro, *jax.tree.map(lambda leaf: leaf[0], micro_batches))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zeros, micro_batches)[0]

    def train_step(state: TrainState, episodes: Any, base: Params | None = None):
        learning_rate = towers.schedule(state.step)
        draws = towers.draws(state, state.step, jax.tree.leaves(episodes)[0].shape[0])
        parts = Towers(merge(state.params, base), merge(state.target_params, base))
        of_online, sums = gradient(parts, episodes, draws, towers.dropout_key(state))
        transitions = sums.means["loss"][1]
        divisor, tau = jnp.maximum(transitions, 1.0), towers.config.tau
        state, learned = towers.learn(state, (of_online, None), sums.loss, divisor, tau=tau)
        metrics = sums.metrics() | learned | padding_share(sums.tokens)
        metrics |= {"learning_rate": learning_rate, "alpha": draws.alpha}
        return counted(state, transitions, metrics)

    return towers.update(train_step, towers.on_mesh(_BY_EPISODE))


def make_play_step(towers: TwoTowers) -> PlayStep:
    """The program `(state, batch, number) → Played`, split over the mesh as the training step.

    `number`, an int32 scalar on the device, is that of the step that will learn from the batch. It
    determines the draws. Temperature, random acting and dropout are those of `state`.
    """
    actor = towers.actor

    def play(
        state: TrainState, batch: EpisodeBatch, number: jax.Array, base: Params | None = None
    ) -> Played:
        draws = towers.draws(state, number, batch.sample.shape[0])
        params = with_dropout(merge(state.params, base), towers.dropout_key(state))
        trajectory = rollout(actor, (params,), actor.playable(batch), draws)
        return Played(trajectory.actions, trajectory.valid, trajectory.entropy)

    split = towers.on_mesh(_BY_EPISODE)
    return towers.program(play, (towers.shardings, split, towers.on_mesh(REPLICATED)), split)

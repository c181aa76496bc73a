"""A learner of two towers, and its programs: training steps, and play whose rewards come later.

A training step plays, scores and learns in ONE program. Where rewards come from outside, one
program plays, and another one learns once they are there. K batches lie between the two, so that
the device is busy while a reward model works. Learning uses the current weights, not those that
played the batch. With K = 0 and the same rewards both ways are equal (tested).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from qrag_jax.algorithms.pqn import alpha_at
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners import placement
from qrag_jax.learners.config import PQNConfig
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.pqn import Feedback, FusedGradient, ScoredGradient, Towers, with_dropout
from qrag_jax.learners.state import Parts, TrainState, dropout_key, episode_keys
from qrag_jax.learners.update import (
    REPLICATED,
    Learner,
    Metrics,
    Update,
    added,
    counted,
    step_metrics,
)
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.rollouts.chunks import Actor, Draws, rollout
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.runtime.mesh import BATCH_AXES, Rules

PlayStep = Callable[..., Played]  # (state, batch, number of the batch), then a base if any
_BY_EPISODE = PartitionSpec(BATCH_AXES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowers(Learner):
    """Two towers, or adapters on one frozen base, and how they learn.

    Attributes:
        actor: plays; its encoder is that of the mesh.
        config: constants of PQN.
        peak: the highest learning rate.
        accumulation: number of micro-batches in a step, on each device.
        base: the frozen base of adapters; None if whole towers are trained.
    """

    actor: Actor
    config: PQNConfig
    peak: float
    accumulation: int = 1
    base: Params | None = None

    def __post_init__(self) -> None:
        # The encoder computes on the mesh, with the parts of parameters that lie there.
        object.__setattr__(self, "actor", self.actor.on(self.mesh))

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        actor: Actor,
        loaded: LoadedEncoder,
        rules: Rules,
        *,
        config: PQNConfig,
        optimizer: OptimizerConfig,
        accumulation: int = 1,
        placed: bool = True,
        first: int = 0,
    ) -> TwoTowers:
        """The towers that start from a loaded encoder.

        A frozen base is placed on the mesh; if `placed` is False, it is described by shapes.

        Args:
            first: the step of the run with which their schedule begins.
        """
        parts, schedule = (
            Parts(make_optimizer(optimizer), has_targets=True),
            learning_rate_schedule(optimizer),
        )
        base_shardings = placement.base_shardings(mesh, rules, loaded.base)
        put = placement.place if placed else placement.shapes_on
        return cls(
            mesh=mesh,
            shardings=parts.shardings(mesh, rules, loaded.trained),
            parts=parts,
            actor=actor,
            config=config,
            schedule=lambda step: schedule(step - first),
            peak=optimizer.learning_rate,
            accumulation=accumulation,
            base_shardings=base_shardings,
            base=put(loaded.base, base_shardings),
        )

    def imitating(self, optimizer: OptimizerConfig) -> TwoTowers:
        """As they learn in a first stage, without targets of their own."""
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, tau=1.0),
            parts=self.parts._replace(optimizer=make_optimizer(optimizer)),
            schedule=learning_rate_schedule(optimizer),
            peak=optimizer.learning_rate,
        )

    def next_stage(self, state: TrainState) -> TrainState:
        """The state with which a later stage begins: targets are the towers, moments zero."""
        return jax.jit(self.parts.next_stage, out_shardings=self.shardings)(state)

    @property
    def drops(self) -> bool:
        """Whether there is dropout."""
        return self.actor.encoder.drops(self.base_shardings is not None)

    @property
    def params_shardings(self) -> Params | Adapted:
        """Where the parameters live, including the frozen base if adapters are trained."""
        return merge(self.shardings.params, self.base_shardings)

    def first_state(self, tower: Params, seed: int, second: Params | None = None) -> TrainState:
        """The first state (`Parts.first_state`)."""
        return self.parts.first_state(self.shardings, tower, seed, second)

    def draws(self, state: TrainState, number: jax.Array, episodes: int) -> Draws:
        """The draws of one batch; the first environment steps of a run act uniformly at random.

        Args:
            number: the step that learns from the batch; the keys depend on it alone.
            episodes: B, the size of the batch.
        """
        return Draws(
            episode_keys(state, number, episodes),
            alpha_at(self.config.alpha, self.schedule(state.step), self.peak),
            state.env_steps < 2 * self.config.learning_start,
        )

    def with_base(self, params: Params) -> Params | Adapted:
        """The parameters to play with: adapters together with their base, or whole towers."""
        return merge(params, self.base)

    def bound(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program with the base as its last argument, if there is a base."""
        if self.base is None:
            return program
        return lambda *arguments: program(*arguments, self.base)


def make_train_step(towers: TwoTowers, feedback: Feedback) -> Update:
    """Makes the jitted `(state, batch) → (state, metrics)`; the state's buffers are donated.

    If the state holds adapters, it is `(state, batch, base)`: both towers, online and target, share
    one frozen base, which is neither changed nor donated.

    The batch is split over the mesh's batch axes and, on each device, into `accumulation`
    micro-batches. Losses are sums with their counts, and every episode has its own PRNG key, so
    any split gives the same numbers as the whole batch. This also holds with dropout, whose masks
    depend on the step and the content of rows (`models.compute.dropout`).

    The state lives where `shardings` say. A kernel that is split over `fsdp` is gathered when its
    layer is computed, forward and backward. Each device gets back its part of the summed gradient,
    and the optimizer and the target towers work on parts alone (Rajbhandari et al., arXiv
    1910.02054, ZeRO stage 3). Layers that are split over `tensor` are computed where they are.

    Metrics are float32 scalars: means over transitions (`loss`, `mean_q`, `mean_target`,
    `td_error`, `entropy`), means over episodes (`return`, `fact_em` of the acting policy), and
    `grad_norm`, `learning_rate`, `alpha`, `padding_share`, `env_steps` and `skipped`. `skipped` is
    1 if the loss or the gradient was not finite and nothing was learned (`Learner.learn`).
    """
    return make_step(towers, FusedGradient(towers.actor, towers.config, feedback))


def make_learn_step(towers: TwoTowers) -> Update:
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


def make_step(
    towers: TwoTowers,
    gradient_of: Callable[..., tuple[Params, Any]],
    more_metrics: Callable[[Any, Metrics], Metrics] = lambda episodes, metrics: metrics,
) -> Update:
    """As `make_train_step`, with any function that gives the gradient of the summed loss.

    Args:
        gradient_of: `(towers, episodes, draws, dropout_key)` → the gradient and its sums, such as
            `FusedGradient`; episodes are a pytree with the batch on axis 0, and the sums have
            `loss`, `transitions`, `tokens` and `means()`.
        more_metrics: `(episodes, metrics)` → the metrics with more of them from the episodes.
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
        key = dropout_key(state) if towers.drops else None
        parts = Towers(merge(state.params, base), merge(state.target_params, base))
        of_online, sums = gradient(parts, episodes, draws, key)
        divisor, tau = jnp.maximum(sums.transitions, 1.0), towers.config.tau
        state, step = towers.learn(state, (of_online, None), sums.loss, divisor, tau=tau)
        metrics = sums.means() | step_metrics(step, learning_rate, sums.tokens)
        return counted(
            state, sums.transitions, more_metrics(episodes, metrics | {"alpha": draws.alpha})
        )

    return towers.update(train_step, towers.on_mesh(_BY_EPISODE))


def make_play_step(towers: TwoTowers) -> PlayStep:
    """Makes the jitted `(state, batch, number) → Played`, split over the mesh as the training step.

    `number` is an int32 scalar on the device: the number of the step that will learn from the
    batch. It determines the draws. Temperature, random acting and dropout are those of `state`.
    """
    actor = towers.actor

    def play(
        state: TrainState, batch: EpisodeBatch, number: jax.Array, base: Params | None = None
    ) -> Played:
        draws = towers.draws(state, number, batch.sample.shape[0])
        key = dropout_key(state) if towers.drops else None
        params = with_dropout(merge(state.params, base), key)
        if actor.config.stop_action:
            batch = with_stop(batch)
        trajectory = rollout(actor, (params,), batch, draws)
        return Played(trajectory.actions, trajectory.valid, trajectory.entropy)

    split = towers.on_mesh(_BY_EPISODE)
    return towers.program(play, (towers.shardings, split, towers.on_mesh(REPLICATED)), split)


def scored_shapes(batch: EpisodeBatch, steps: int) -> ScoredEpisodes:
    """Shapes and dtypes of the scored episodes of a batch, which is given as shapes too."""

    def of(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((batch.sample.shape[0], steps), dtype)

    played = Played(of(jnp.int32), of(jnp.bool_), of(jnp.float32))
    return ScoredEpisodes(batch, played, of(jnp.float32), of(jnp.bool_))

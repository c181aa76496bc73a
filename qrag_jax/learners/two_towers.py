"""The parts from which the programs of a two-tower learner are built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from qrag_jax.algorithms.pqn import alpha_at
from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.pqn import PQNConfig
from qrag_jax.learners.state import TrainState, episode_keys, init_state
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.rollouts.chunks import Actor, Draws
from qrag_jax.runtime.sharding import Rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowers:
    """Two towers, or adapters on one frozen base, and how they learn.

    Attributes:
        shardings: where the training state lives, from `learners.placement.state_shardings`.
        schedule: optimizer step → learning rate.
        peak: the highest learning rate.
        actor: plays; its encoder is that of the mesh.
        accumulation: number of micro-batches in a step, on each device.
        base, base_shardings: the frozen base of adapters and where it lives; None if whole towers
            are trained.
    """

    mesh: Mesh
    shardings: TrainState
    actor: Actor
    config: PQNConfig
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    peak: float
    accumulation: int = 1
    base_shardings: Params | None = None
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
        transformation, schedule = make_optimizer(optimizer), learning_rate_schedule(optimizer)
        base = base_shardings = None
        if loaded.adapters is not None:
            base_shardings = placement.base_shardings(mesh, rules, loaded.stored)
            put = placement.place if placed else placement.shapes_on
            base = put(loaded.stored, base_shardings)
        return cls(
            mesh=mesh,
            shardings=placement.state_shardings(mesh, rules, loaded.trained, transformation),
            actor=actor,
            config=config,
            optimizer=transformation,
            schedule=lambda step: schedule(step - first),
            peak=optimizer.learning_rate,
            accumulation=accumulation,
            base_shardings=base_shardings,
            base=base,
        )

    def imitating(self, optimizer: OptimizerConfig) -> TwoTowers:
        """As they learn in a first stage, without targets of their own."""
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, tau=1.0),
            optimizer=make_optimizer(optimizer),
            schedule=learning_rate_schedule(optimizer),
            peak=optimizer.learning_rate,
        )

    def next_stage(self, state: TrainState) -> TrainState:
        """The state with which a later stage begins: targets are the towers, moments zero."""

        def begin(state: TrainState) -> TrainState:
            begun = init_state(state.params, self.optimizer, state.key)
            return begun._replace(step=state.step, env_steps=state.env_steps)

        return jax.jit(begin, out_shardings=self.shardings)(state)

    @property
    def drops(self) -> bool:
        """Whether there is dropout."""
        return self.actor.encoder.drops(self.base_shardings is not None)

    @property
    def params_shardings(self) -> Params | Adapted:
        """Where the parameters live, including the frozen base if adapters are trained."""
        params = self.shardings.params
        return params if self.base_shardings is None else Adapted(self.base_shardings, params)

    def first_state(self, tower: Params, seed: int, second: Params | None = None) -> TrainState:
        """The first state (`placement.first_state`)."""
        return placement.first_state(self.shardings, tower, self.optimizer, seed, second)

    def state_shapes(self, tower: Params) -> TrainState:
        """Shape and dtype of every array of the state, from arrays or shapes of one tower."""
        return placement.state_shapes(tower, self.optimizer)

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
        return params if self.base is None else Adapted(self.base, params)

    def bound(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program with the base as its last argument, if there is a base."""
        if self.base is None:
            return program
        return lambda *arguments: program(*arguments, self.base)

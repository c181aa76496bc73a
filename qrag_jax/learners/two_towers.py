"""What the programs of a learner of two towers are made of."""

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
from qrag_jax.learners.state import TrainState, episode_keys
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.rollouts.chunks import Actor, Draws
from qrag_jax.runtime.sharding import Rules


@dataclasses.dataclass(frozen=True)
class TwoTowers:
    """Two towers, or adapters on one frozen base, and how they learn.

    Attributes:
        shardings: of the state, as `learners.placement.state_shardings` gives them.
        schedule: optimizer step → learning rate. peak: its highest.
        accumulation: micro-batches a step is computed in, on each device.
        base, base_shardings: of the base that adapters stand on, None where whole towers are
            trained.
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
    ) -> TwoTowers:
        """Those that start from a loaded encoder; its base is put on the mesh."""
        transformation = make_optimizer(optimizer)
        base = base_shardings = None
        if loaded.adapters is not None:
            base_shardings = placement.base_shardings(mesh, rules, loaded.stored)
            base = placement.place(loaded.stored, base_shardings)
        return cls(
            mesh,
            placement.state_shardings(mesh, rules, loaded.trained, transformation),
            actor,
            config,
            transformation,
            learning_rate_schedule(optimizer),
            optimizer.learning_rate,
            accumulation,
            base_shardings,
            base,
        )

    @property
    def drops(self) -> bool:
        """Whether there is dropout."""
        return self.actor.encoder.drops(self.base_shardings is not None)

    @property
    def params_shardings(self) -> Params | Adapted:
        """Where the parameters live, with the base that adapters stand on."""
        params = self.shardings.params
        return params if self.base_shardings is None else Adapted(self.base_shardings, params)

    def first_state(self, tower: Params, seed: int) -> TrainState:
        """Both towers start from the same one, see `placement.first_state`."""
        return placement.first_state(self.shardings, tower, self.optimizer, seed)

    def state_shapes(self, tower: Params) -> TrainState:
        """Shape and dtype of every array of the state, from arrays or shapes of one tower."""
        return placement.state_shapes(tower, self.optimizer)

    def draws(self, state: TrainState, number: jax.Array, episodes: int) -> Draws:
        """How the actions of one batch are drawn: α_t, and uniformly in the first steps of a run.

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
        """What is played with: adapters together with their base."""
        return params if self.base is None else Adapted(self.base, params)

    def bound(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program, which is given the base behind its other arguments if there is one."""
        if self.base is None:
            return program
        return lambda *arguments: program(*arguments, self.base)

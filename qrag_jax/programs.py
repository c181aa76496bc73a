"""The compiled programs of a training: playing, learning, or both in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import ml_collections
from jax.sharding import Mesh

from qrag_jax import experiment
from qrag_jax.block_shapes import choose_block_shapes
from qrag_jax.evaluators import episodes
from qrag_jax.learners import placement, pqn
from qrag_jax.learners.deferred import PlayStep, make_learn_step, make_play_step
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.step import TrainStep, make_train_step
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import Params
from qrag_jax.training import Inputs


@dataclasses.dataclass
class Programs:
    """What a run computes with, each compiled when it is first used.

    Where adapters are trained the frozen base goes in by itself: the loop knows of what is trained
    alone.
    """

    config: ml_collections.ConfigDict
    mesh: Mesh
    shardings: pqn.TrainState
    inputs: Inputs
    base: Params | None = None
    base_shardings: Params | None = None

    def __post_init__(self) -> None:
        config, loaded = self.config, self.inputs.encoder
        stores = [*self.inputs.stores.values()]
        self._block_shapes = choose_block_shapes(config, loaded.encoder, self.inputs.shape, stores)
        self._rollout, self._pqn = experiment.rollout_config(config), experiment.pqn_config(config)
        self._reward = experiment.feedback(config)
        optimizer = experiment.optimizer_config(config)
        self._optimizer, self._schedule = (
            make_optimizer(optimizer),
            learning_rate_schedule(optimizer),
        )
        self._peak, self._accumulation = optimizer.learning_rate, config.train.accumulation
        if loaded.adapters is not None:
            rules = experiment.sharding_rules(config, loaded.partition_rules)
            self.base_shardings = placement.base_shardings(self.mesh, rules, loaded.stored)
            self.base = placement.place(loaded.stored, self.base_shardings)

    @cached_property
    def step(self) -> TrainStep:
        """`make_train_step`, with rewards from the supporting facts."""
        program = make_train_step(
            self.mesh,
            self.shardings,
            self.inputs.encoder.encoder,
            self._block_shapes,
            self._rollout,
            self._pqn,
            self._reward,
            self._optimizer,
            self._schedule,
            self._peak,
            self._accumulation,
            self.base_shardings,
        )
        return self._with_base(program)

    @cached_property
    def play_step(self) -> PlayStep:
        """`make_play_step`."""
        program = make_play_step(
            self.mesh,
            self.shardings,
            self.inputs.encoder.encoder,
            self._block_shapes,
            self._rollout,
            self._pqn,
            self._schedule,
            self._peak,
            self.base_shardings,
        )
        return self._with_base(program)

    @cached_property
    def learn_step(self) -> TrainStep:
        """`make_learn_step`."""
        program = make_learn_step(
            self.mesh,
            self.shardings,
            self.inputs.encoder.encoder,
            self._block_shapes,
            self._rollout,
            self._pqn,
            self._optimizer,
            self._schedule,
            self._peak,
            self._accumulation,
            self.base_shardings,
        )
        return self._with_base(program)

    @cached_property
    def play(self) -> episodes.Play:
        """`episodes.make_play`."""
        of_params: Any = self.shardings.params
        if self.base is not None:
            of_params = Adapted(self.base_shardings, of_params)
        program = episodes.make_play(
            self.mesh,
            of_params,
            self.inputs.encoder.encoder,
            self._block_shapes,
            self._rollout,
            self._reward,
            self._pqn.gamma,
        )
        if self.base is None:
            return program
        return lambda adapters, batch: program(Adapted(self.base, adapters), batch)

    def _with_base(self, program: Callable[..., Any]) -> Callable[..., Any]:
        if self.base is None:
            return program
        return lambda *arguments: program(*arguments, self.base)

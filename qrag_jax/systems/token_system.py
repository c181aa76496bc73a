"""What all systems share whose policy is a language model: its weights, its stages, its play."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from qrag_jax.environments.tools.episode import Agent
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.learners import placement
from qrag_jax.learners.policy_state import PolicyState, first_state, state_shapes
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import BlockShape, choose_shape
from qrag_jax.rollouts.token_episodes import Library, Speech, TokenCounts
from qrag_jax.runtime import hosts
from qrag_jax.runtime.device_memory import FirstCalls
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import log
from qrag_jax.runtime.sharding import shardings_of
from qrag_jax.systems.episode_player import EpisodePlayer, PlayRules, Scene
from qrag_jax.systems.served_policy import ServedPolicy, Versioned
from qrag_jax.systems.token_config import TokenConfig
from qrag_jax.systems.token_stages import Stage

EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it
_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


class TokenInputs(Protocol):
    """What is read here of a system's inputs; see `Scene`.

    Attributes:
        data: content keys.
    """

    @property
    def model(self) -> FirstLanguageModel: ...
    @property
    def agent(self) -> Agent | None: ...
    @property
    def library(self) -> Library | None: ...
    @property
    def speech(self) -> Speech: ...
    @property
    def data(self) -> Mapping[str, str]: ...


class Scores(Protocol):
    """Scores the fixed questions of a training."""

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation: ...


Config = TypeVar("Config", bound=TokenConfig)
Inputs = TypeVar("Inputs", bound=TokenInputs)


@dataclasses.dataclass
class TokenSystem(abc.ABC, Generic[Config, Inputs]):
    """See `systems.System`.

    Attributes:
        workdir: the run's folder.
        placed: else the mesh's devices are described, and only shapes are made.
        keep: saves the parameters at the end of a stage, with the steps done until then.
        served: what samples the episodes that are learned from; None: the device.
        own: of this host's devices, which play without the other hosts; None: there is one host.
    """

    SECTION: ClassVar[str]  # of the config: how often and how patiently episodes are played
    NAME: ClassVar[str]  # field `system` of the config
    config: Config
    mesh: Mesh
    inputs: Inputs
    workdir: Path
    placed: bool = True
    keep: Callable[[int, Any], None] = lambda step, params: None
    served: ServedPolicy | None = None
    own: Mesh | None = None

    def __post_init__(self) -> None:
        self.train, self.profile = self.config.train, self.config.profile
        self.data, self.provenance = self.inputs.data, dict[str, Any]()
        self.counts = TokenCounts()
        self._step: int | None = None  # of the next update

    @classmethod
    def staleness(cls, config: Config) -> int:
        """K: updates between playing a batch and learning from it."""
        return 0

    @property
    @abc.abstractmethod
    def stages(self) -> Sequence[Stage]:
        """The stages, in their order; the first one begins with step 0."""

    @abc.abstractmethod
    def _longest(self, stage: Any) -> Any:
        """A batch of a stage whose rows are as long as they may be."""

    @property
    @abc.abstractmethod
    def _scores(self) -> Scores:
        """Scores parameters during the training."""

    # ---------------------------------------------------------------- learning

    def first_state(self) -> PolicyState:
        """See `System`."""
        stage, given = self.stages[0], (self.inputs.model.trained, self.config.seed)
        return first_state(stage.policy.shardings, stage.parts, *given)

    @property
    def param_shardings(self) -> Any:
        """Where the trained parameters lie."""
        return self.stages[0].policy.shardings.params

    @property
    def untrained(self) -> Any:
        """The parameters that training begins with, on the mesh."""
        return placement.place(self.inputs.model.trained, self.param_shardings)

    @cached_property
    def base(self) -> tuple[Any, ...]:
        """What adapters are on, as updates take it; () if all weights are trained."""
        shardings = self.stages[0].policy.base_shardings
        if shardings is None:
            return ()
        put = placement.place if self.placed else placement.shapes_on
        return (put(self.inputs.model.loaded.stored, shardings),)

    def update(self, state: PolicyState, episodes: Any) -> tuple[PolicyState, Any]:
        """See `System`."""
        stage, state = self._at_stage(state)
        return self._learned(stage, state, episodes)

    def _at_stage(self, state: PolicyState) -> tuple[Stage, PolicyState]:
        """The stage of the next update, and the state, which begins anew with a later stage."""
        step = self._updates(state)
        stage = next(each for each in reversed(self.stages) if each.first <= step)
        if step == stage.first > 0:
            self.keep(step, state.params)
            state = stage.begin(state)
        self._step = step + 1
        return stage, state

    def _learned(
        self, stage: Stage, state: PolicyState, episodes: Any
    ) -> tuple[PolicyState, dict[str, Any]]:
        arguments = (state, episodes, *self.base)
        with jax.transfer_guard("disallow"):
            self._first_calls.before(self._name(stage), stage.update, arguments)
            return stage.update(*arguments)

    def _updates(self, state: PolicyState) -> int:
        """Updates that the state has seen; asked of the device once, which would wait each time."""
        if self._step is None:
            self._step = int(jax.device_get(state.step))
        return self._step

    @property
    def _latest(self) -> int:
        """The number of the latest step."""
        return max((self._step or 1) - 1, 0)

    def block_shape(self, batch: TokenBatch, members: int, *, whole: bool = False) -> BlockShape:
        """The shape of the blocks in which the rows of a batch are computed.

        Args:
            members: rows of a group.
            whole: see `choose_shape`.
        """
        tokens = self.config.model.tokens(Platform.of(self.mesh))
        return choose_shape(batch, tokens, members, room=self.config.sampling.room, whole=whole)

    def programs(self) -> list[Program]:
        """See `System`: the updates by one batch of the longest rows there may be."""
        return [self._program(self._name(stage), stage) for stage in self.stages]

    @staticmethod
    def _name(stage: Stage) -> str:
        return f"update by {type(stage.policy.config).__name__}"

    @cached_property
    def _first_calls(self) -> FirstCalls:
        return FirstCalls(self.mesh.local_devices, self.NAME, log)

    def _program(self, name: str, stage: Stage) -> Program:
        # Shapes alone: the devices of a dry run may be described ones.
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._longest(stage)
        )
        model = self.inputs.model
        state = state_shapes(stage.parts, model.trained)
        return Program(name, stage.update, (state, shapes, *self.base))

    # ---------------------------------------------------------------- play

    @cached_property
    def player(self) -> EpisodePlayer:
        """Plays episodes."""
        config, inputs, section = self.config, self.inputs, getattr(self.config, self.SECTION)
        rules = PlayRules(
            seed=config.seed,
            sampling=config.sampling,
            attempts=section.attempts,
            max_failed_share=section.max_failed_share,
            section=self.SECTION,
            turn=self._turn,
        )
        scene = Scene(inputs.model.loaded, inputs.agent, inputs.library, inputs.speech)
        base = self.base[0] if self.base else None
        if self.own is None or self.own is self.mesh:
            return EpisodePlayer(rules, scene, self.mesh, base, self.served, self.counts)
        model, rules_of = inputs.model, config.runtime.rules(inputs.model.partition_rules)
        shardings = shardings_of(self.own, rules_of, model.trained, model.trained)
        if model.base is not None:
            base = placement.place(
                model.base, placement.base_shardings(self.own, rules_of, model.base)
            )
        here = partial(hosts.copied, shardings=shardings)
        return EpisodePlayer(rules, scene, self.own, base, self.served, self.counts, here)

    @property
    def _turn(self) -> int:
        """Most tokens of a turn that is learned from; 0: as many as in evaluation."""
        return 0

    def weights(self, state: PolicyState) -> Any:
        """What plays: parameters, or a version of them for the server.

        Parameters that play while there are updates are copied, since updates overwrite them.
        """
        params = _copied(state.params) if self.staleness(self.config) else state.params
        return params if self.served is None else Versioned(params, self._updates(state))

    def evaluate(self, state: PolicyState, step: int, stop: StopSignal) -> Evaluation:
        """See `System`."""
        return self._scores.evaluate(state.params, step, stop)

    # ---------------------------------------------------------------- what is told

    @property
    def _where(self) -> str:
        """Where the run computes and samples, for its line."""
        served = ", sampled by vLLM" if self.served else ""
        return f"on {self.mesh.size} {Platform.of(self.mesh).kind} device(s){served}"

    def counted(self) -> TokenCounts:
        """What the episodes of all hosts needed; all hosts call this together."""
        own = np.array(dataclasses.astuple(self.counts))
        return TokenCounts(*hosts.of_each(own).sum(axis=0).tolist())

    def _of_server(self) -> dict[str, float]:
        """What the server was asked, as metrics; {} if the device samples."""
        return self.served.counts() if self.served is not None else {}

    @property
    def _advice(self) -> str:
        rate = self.config.optimizer.learning_rate
        return f"a lower --config.optimizer.learning_rate (it is {rate:g}), or "

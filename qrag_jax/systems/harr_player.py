"""Plays HARR's episodes: the agent asks its searches of the query encoder, with any parameters."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.environments.rag.episode import Agent, Task
from qrag_jax.environments.rag.state_text import StateText
from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.rollouts.agents import AgentRollout, Checks, Counts, Episode, Start
from qrag_jax.rollouts.draw_keys import draw_keys
from qrag_jax.rollouts.mesh_tower import MeshTower
from qrag_jax.rollouts.patient_play import ADVICE, Patience
from qrag_jax.rollouts.pool_search import Ask, Found, PoolSearch, QueryRows
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems.harr_config import SCRIPTED, HarrConfig
from qrag_jax.systems.harr_inputs import Asked, Inputs
from qrag_jax.systems.harr_models import HarrModels, llm_agent, scripted_agent


@dataclasses.dataclass(frozen=True)
class Home:
    """Where parameters live that play.

    Attributes:
        mesh: of devices of this host.
        params: the shardings of what is trained.
        base_shardings: of the base of adapters; None: all weights are trained.
        base: this base, placed; None likewise.
        is_apart: whether the mesh is another one than that of training.
    """

    mesh: Mesh
    params: Any
    base_shardings: Any
    base: Any
    is_apart: bool


@dataclasses.dataclass
class HarrPlayer:
    """Plays episodes by given parameters.

    Attributes:
        models: what the agent asks; None: it asks no model.
        rows: how states are cut to rows of tokens.
        device: held while programs of the encoder are begun.
        counts: of all that was played.
    """

    config: HarrConfig
    inputs: Inputs
    models: HarrModels | None
    rows: QueryRows
    home: Home
    device: threading.Lock
    counts: Counts = dataclasses.field(default_factory=Counts)

    def here(self, params: Any) -> Any:
        """Parameters of training where they play; all hosts call this together."""
        return hosts.copied(params, self.home.params) if self.home.is_apart else params

    def starts(
        self, asked: Sequence[Asked], members: int, number: int, first: int = 0, apart: int = 1
    ) -> list[Start]:
        """Episodes whose draws depend on the step, the place in the batch and the member alone.

        Args:
            first, apart: places of the questions in the batch of all hosts: the first, and from
                one to the next.
        """
        key = jax.random.fold_in(jax.random.key(self.config.seed), number)
        places = first + apart * np.arange(len(asked), dtype=np.uint32)
        keys = np.asarray(draw_keys(key, places, members))
        return [
            Start(Task(each.gold.id, each.gold.question), place, keys[place, member])
            for place, each in enumerate(asked)
            for member in range(members)
        ]

    def play(
        self, params: Any, starts: Sequence[Start], stop: StopSignal, *, is_greedy: bool = False
    ) -> list[Episode]:
        """Plays episodes by these parameters, until few of them are broken."""
        rollout = self.rollout(params, stop, is_greedy=is_greedy)
        share = self.config.agent.max_broken_share
        advice = ADVICE + (self.models.kept if self.models is not None else "")
        patience = Patience(share, self.watch(stop), log, advice=advice)
        episodes = patience.play(starts, rollout.play)
        self.counts.add(rollout.counts)
        return episodes

    def rollout(self, params: Any, stop: StopSignal, *, is_greedy: bool = False) -> AgentRollout:
        """What plays episodes by these parameters, once each."""
        search = self._search(params, is_greedy=is_greedy)

        def one_at_a_time(asks: Sequence[Ask]) -> Sequence[Found | Failure]:
            with self.device:
                return search(asks)

        model = None if self.models is None else self.models.agents_own
        watch = self.watch(stop)
        return AgentRollout(self._agent, one_at_a_time, model, self.config.agent.play, watch)

    def watch(self, stop: StopSignal) -> Checks:
        """Looks at the signal, and whether the language model was given up."""
        return stop if self.models is None else self.models.watch(stop)

    @cached_property
    def _agent(self) -> Agent:
        if self.config.agent.name == SCRIPTED:
            return scripted_agent(self.config.agent, (*self.inputs.train, *self.inputs.dev))
        assert self.models is not None
        if self.models.own_agent is not None:
            return self.models.own_agent
        assert self.models.generation is not None
        return llm_agent(self.config, self.models.generation)

    def _search(self, params: Any, *, is_greedy: bool) -> PoolSearch:
        whole = params if self.home.base is None else Adapted(self.home.base, params)
        return PoolSearch(
            self._tower.with_params(whole),
            self.inputs.index,
            self._states,
            self.rows,
            self.config.policy,
            is_greedy,
        )

    @cached_property
    def _tower(self) -> MeshTower:
        """The query encoder's programs; `_search` gives it the parameters."""
        of_params, of_base = self.home.params, self.home.base_shardings
        return MeshTower(
            self.home.mesh,
            of_params if of_base is None else Adapted(of_base, of_params),
            self.inputs.encoder.encoder,
            None,
            number=None,
            row_tokens=self.rows.max_tokens,
        )

    @cached_property
    def _states(self) -> StateText:
        state = self.config.state
        instruction = None if state.instruction else ""
        return StateText(state.stateful, instruction, self.rows.room, self.rows.count)

"""HARR (arXiv 2602.03645): GRPO or PPO trains a query encoder inside an agent that searches.

The agent and the document index do not change; the retriever is the policy, and the answer's score
is its reward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.environments.episode import Agent, Failed, Task
from qrag_jax.errors import InputError
from qrag_jax.evaluators.agents import AgentScores
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.feedback.llm import Checks, Patience, leave_room
from qrag_jax.learners import placement
from qrag_jax.learners.config import PPOConfig
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.query_encoder import QueryEncoder, make_query_update
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.rollouts.agents import ADVICE, HOPELESS, AgentRollout, Episode, Start
from qrag_jax.rollouts.block_shapes import choose_row_blocks, even_rounds
from qrag_jax.rollouts.experience import AgentExperience, Experience, Playing, QuestionOrder
from qrag_jax.rollouts.pool_search import (
    Ask,
    Found,
    HopBatch,
    HopShape,
    PoolSearch,
    QueryRows,
    Rewarded,
    StateText,
    batch_shapes,
    hop_batch,
    restored,
    saved,
)
from qrag_jax.rollouts.schedule import Counts, draw_keys
from qrag_jax.rollouts.text_table import MeshTower
from qrag_jax.runtime import hosts
from qrag_jax.runtime.aot import FirstCalls
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.hosts import AgreedStop
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import host_mesh, make_mesh, shard_batch
from qrag_jax.runtime.platform import Platform, ask_determinism
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import save_config
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems.harr_config import FREE_FIELDS, NAME, PATHS, SCRIPTED, HarrConfig, load_config
from qrag_jax.systems.harr_inputs import (
    AgentRewards,
    Asked,
    HarrModels,
    Inputs,
    llm_agent,
    load_inputs,
    open_models,
    reward_names,
    scripted_agent,
)


@dataclasses.dataclass
class HarrPlayer:
    """Plays episodes by given parameters."""

    config: HarrConfig
    inputs: Inputs
    models: HarrModels | None  # what the agent asks; None: it asks no model
    rows: QueryRows  # how states are cut to rows of tokens
    mesh: Mesh  # of devices of this host, which play
    shardings: Any  # of what is trained
    base_shardings: Any  # of the base of adapters; None: all weights are trained
    base: Any  # this base, placed; None likewise
    is_apart: bool  # whether the mesh is another one than that of training
    device: threading.Lock  # held while programs of the encoder are begun
    counts: Counts = dataclasses.field(default_factory=Counts)

    def here(self, params: Any) -> Any:
        """Parameters of training where they play; all hosts call this together."""
        return hosts.copied(params, self.shardings) if self.is_apart else params

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
        patience = Patience(share, self.watch(stop), log, advice, Failed, HOPELESS)
        return patience.play(starts, rollout.play)

    def rollout(self, params: Any, stop: StopSignal, *, is_greedy: bool = False) -> AgentRollout:
        """What plays episodes by these parameters, once each."""
        search = self._search(params, is_greedy=is_greedy)

        def one_at_a_time(asks: Sequence[Ask]) -> Sequence[Found | Failure]:
            with self.device:
                return search(asks)

        model = None if self.models is None else self.models.agents_own
        watch = self.watch(stop)
        play = self.config.agent.play
        rollout = AgentRollout(self._agent, one_at_a_time, model, play, watch)
        rollout.counts = self.counts
        return rollout

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
        whole = params if self.base is None else Adapted(self.base, params)
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
        of_params, of_base = self.shardings, self.base_shardings
        return MeshTower(
            self.mesh,
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


_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
_EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it


def check(config: ConfigDict) -> None:
    """Refuses values that are wrong for any data."""
    HarrConfig.of(config)


def before_devices(given: ConfigDict, *, dry: bool = False, described: bool = False) -> str:
    """Sets how much of a GPU's memory JAX takes, and that its programs are deterministic."""
    config = HarrConfig.of(given)
    if config.llm is not None and not dry:
        leave_room(config.llm)
    return ask_determinism(config.runtime.deterministic, described=described)


@contextlib.contextmanager
def open_system(
    given: ConfigDict,
    run: Run,
    *,
    dry: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[Harr]:
    """Opens the system, and the server of its language model if it has one; see `systems`."""
    if run.has_begun:
        run.check_config(load_config(run.config_path), given, FREE_FIELDS, PATHS)
    config = HarrConfig.of(given)
    mesh = make_mesh(config.runtime.mesh, devices)
    own = mesh if devices is not None else host_mesh(config.runtime.mesh)
    hosts.check_play(config.runtime.mesh, own, config.agent.staleness)
    if config.episodes % mesh.size or config.episodes // mesh.size < 1:
        raise InputError(
            f"config.train.batch_size × members is {config.episodes} episodes, which do not split "
            f"over {mesh.size} devices; use a multiple of them."
        )
    with contextlib.ExitStack() as stack:
        # The server starts while the data are read and the corpus is embedded.
        models = None if dry else stack.enter_context(open_models(config, run.workdir))
        with AgreedStop() as stop:
            kept = run.has_begun
            inputs = load_inputs(config, run.workdir, own, stop, is_kept=kept, searches=not dry)
        run.begin(lambda: save_config(given, run.config_path))
        yield Harr(config, mesh, inputs, models, placed=devices is None, own=own)


@dataclasses.dataclass
class Harr:
    """See `systems.System`."""

    config: HarrConfig
    mesh: Mesh
    inputs: Inputs
    # What the agent and the rewards ask; None: nothing will be played
    models: HarrModels | None = None
    placed: bool = True  # else the mesh's devices are described, and only shapes are made
    # Of this host's devices, which play without the other hosts; None: there is one host
    own: Mesh | None = None

    def __post_init__(self) -> None:
        # Programs that send between devices must begin in the same order on all of them, also those
        # of a thread that plays ahead.
        self._device = threading.Lock()
        self.train, self.profile = self.config.train, self.config.profile
        self.data = self.inputs.data
        self.provenance = self.models.provenance if self.models else {}
        self.told = Told(
            lambda numbers: [self.inputs.train[number].gold.id for number in numbers],
            {"loss": ".3f", "return": ".2f"},
            "a lower --config.optimizer.learning_rate (it is "
            f"{self.config.optimizer.learning_rate:g}), or ",
        )
        config, inputs = self.config, self.inputs
        searched = inputs.searched
        over = (
            "a corpus that is not read" if searched is None else f"{len(searched.corpus)} passages"
        )
        self.line = (
            f"{len(inputs.train)} training questions, {len(inputs.dev)} scored every "
            f"{self.train.eval_every} steps, over {over}; "
            f"{self.train.steps} steps of {config.train.batch_size} questions × "
            f"{config.algorithm.members} episodes by the {config.agent.name} agent on "
            f"{self.mesh.size} {Platform.of(self.mesh).kind} device(s)"
        )

    def first_state(self) -> TrainState:
        """See `System`."""
        trained = self.inputs.encoder.trained
        return self._parts.first_state(self.learner.shardings, trained, self.config.seed)

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """See `System`."""
        # Made before a thread plays ahead: two threads would make two, each with counts of its own.
        config, player = self.config, self.player
        if self.models is not None:
            self.models.wait(stop)
        shard = jax.process_index(), jax.process_count()
        order = QuestionOrder(len(self.inputs.train), config.train.batch_size, config.seed, shard)
        stale = config.agent.staleness
        playing = Playing(
            play=self._play,
            batch=lambda episodes, number: self._batch(episodes),
            save=saved,
            restore=lambda kept: restored(kept, self.inputs.index.vectors),
            params=lambda state: _copied(state.params) if stale else player.here(state.params),
            staleness=stale,
            steps=config.train.steps,
        )
        done, pending = run.progress.batches or 0, run.progress.pending
        return AgentExperience(order, playing, self._counted, done, pending=pending)

    def _batch(self, episodes: Sequence[Rewarded]) -> HopBatch:
        return shard_batch(self.mesh, hop_batch(episodes, self._shape, self.config.policy))

    def update(self, state: TrainState, episodes: HopBatch) -> tuple[TrainState, dict[str, Any]]:
        """See `System`."""
        with self._device, jax.transfer_guard("disallow"):
            arguments = (state, episodes, *self._base)
            self._first_calls.before("update", self._update, arguments)
            updated = self._update(*arguments)
            if self.config.agent.staleness and Platform.of(self.mesh).on_cpu:
                # It has no queue that keeps the order of programs.
                jax.block_until_ready(updated)
            return updated

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        """See `System`."""
        return self._scores.evaluate(self.player.here(state.params), step, stop)

    def programs(self) -> list[Program]:
        """See `System`."""
        state = self._parts.shapes(self.inputs.encoder.trained)
        batch = batch_shapes(self.config.episodes, self._shape, self.config.policy)
        learner, hops = self.learner, self._shape.hops
        # Devices along `tensor` compute all their rows together (`models.compute.dealing`).
        together = self.config.episodes * learner.encoder.module.group.tensor // self.mesh.size
        loops = partial(even_rounds, learner.blocks, together * hops, self._shape.tokens)
        return [Program("update", self._update, (state, batch, *self._base), loops)]

    @cached_property
    def learner(self) -> QueryEncoder:
        """The query encoder, from which all programs are built."""
        config, loaded = self.config, self.inputs.encoder
        rules = config.runtime.rules(loaded.partition_rules)
        longest, platform = self._rows.max_tokens, Platform.of(self.mesh)
        of_base = None
        if loaded.adapters is not None:
            of_base = placement.base_shardings(self.mesh, rules, loaded.stored)
        of_episode, of_hop = reward_names(self.config.reward.rewards)
        weights = config.reward.rewards.weights
        return QueryEncoder(
            mesh=self.mesh,
            shardings=self._parts.shardings(self.mesh, rules, loaded.trained),
            encoder=loaded.encoder,
            blocks=choose_row_blocks(config.encoder, longest, platform),
            config=config.algorithm,
            tau=config.policy.tau,
            weights=(
                tuple(weights[name] for name in of_episode),
                tuple(weights[name] for name in of_hop),
            ),
            parts=self._parts,
            schedule=learning_rate_schedule(config.optimizer),
            base_shardings=of_base,
            is_fresh=not config.agent.staleness,
        )

    @cached_property
    def _first_calls(self) -> FirstCalls:
        return FirstCalls(self.mesh.local_devices, NAME, log)

    @cached_property
    def _parts(self) -> Parts:
        config = self.config
        critic, kl = None, 0.0
        if isinstance(config.algorithm, PPOConfig):
            rate = config.algorithm.critic_learning_rate
            critic = make_optimizer(dataclasses.replace(config.optimizer, learning_rate=rate))
            kl = config.algorithm.kl
        else:
            kl = config.algorithm.beta
        width = self.inputs.encoder.encoder.width
        return Parts(make_optimizer(config.optimizer), critic, kl > 0, width)

    @cached_property
    def _base(self) -> tuple[Any, ...]:
        if self.learner.base_shardings is None:
            return ()
        put = placement.place if self.placed else placement.shapes_on
        return (put(self.inputs.encoder.stored, self.learner.base_shardings),)

    @cached_property
    def _update(self) -> Any:
        return make_query_update(self.learner)

    @cached_property
    def _shape(self) -> HopShape:
        of_episode, of_hop = reward_names(self.config.reward.rewards)
        width = self.inputs.encoder.encoder.width
        hops = self.config.agent.max_hops
        return HopShape(hops, self._rows.max_tokens, width, len(of_episode), len(of_hop))

    @cached_property
    def _rows(self) -> QueryRows:
        loaded = self.inputs.encoder
        encoder = loaded.encoder
        longest = min(self.config.state.max_tokens, encoder.max_positions)
        return QueryRows(loaded.tokenizer, encoder.state_opening, encoder.sep_id, longest)

    @cached_property
    def player(self) -> HarrPlayer:
        """Plays episodes, on this host's devices."""
        own, loaded = self.own or self.mesh, self.inputs.encoder
        if own is self.mesh:
            of_params, of_base = self.learner.shardings.params, self.learner.base_shardings
            base = self._base[0] if self._base else None
        else:
            rules = self.config.runtime.rules(loaded.partition_rules)
            of_params = self._parts.shardings(own, rules, loaded.trained).params
            of_base = base = None
            if loaded.adapters is not None:
                of_base = placement.base_shardings(own, rules, loaded.stored)
                base = placement.place(loaded.stored, of_base)
        return HarrPlayer(
            config=self.config,
            inputs=self.inputs,
            models=self.models,
            rows=self._rows,
            mesh=own,
            shardings=of_params,
            base_shardings=of_base,
            base=base,
            is_apart=own is not self.mesh,
            device=self._device,
        )

    @cached_property
    def rewards(self) -> AgentRewards:
        """Gives episodes their rewards."""
        mixture, corpus = self.config.reward.rewards, self.inputs.index.corpus
        if self.models is None:
            return AgentRewards(mixture, corpus)
        return AgentRewards(mixture, corpus, self.models.judge, self.models.reranker)

    def _play(
        self, params: Any, numbers: Sequence[int], number: int, stop: StopSignal
    ) -> list[Rewarded]:
        """Plays the groups of these questions; see `experience.Playing`."""
        members = self.config.algorithm.members
        asked = [self.inputs.train[each] for each in numbers]
        starts = self.player.starts(asked, members, number, jax.process_index() * len(asked))
        played = self.player.play(params, starts, stop)
        golds = [each.gold for each in asked for _ in range(members)]
        return self.rewards.rewarded(golds, played, self.player.watch(stop))

    @cached_property
    def _scores(self) -> AgentScores:
        asked = self.inputs.dev

        def play(params: Any, places: Sequence[int], stop: StopSignal) -> list[Episode]:
            own = [asked[place] for place in places]
            place, apart = jax.process_index(), jax.process_count()
            starts = self.player.starts(own, 1, _EVALUATED, place, apart)
            return self.player.play(params, starts, stop, is_greedy=True)

        return AgentScores([each.gold for each in asked], play, self.config.eval.best_by)

    def _counted(self) -> dict[str, float]:
        counts, asked = self.player.counts, self.models.counts() if self.models is not None else {}
        own = np.array([counts.searches, counts.batches, counts.failed], np.float64)
        searches, batches, broken = hosts.of_each(own).sum(axis=0).tolist()
        return asked | {
            "searches_per_batch": searches / max(batches, 1),
            "broken_episodes": broken,
        }

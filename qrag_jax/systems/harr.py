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
from qrag_jax.environments.rag import Scripted
from qrag_jax.errors import InputError
from qrag_jax.evaluators.agents import AgentScores
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.feedback.llm import Checks, Patience
from qrag_jax.feedback.rag import Gold
from qrag_jax.learners import placement
from qrag_jax.learners.config import PPOConfig
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.query_encoder import QueryEncoder, make_query_update
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.compute.lora import merge
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
from qrag_jax.runtime.aot import FirstCalls, Program
from qrag_jax.runtime.hosts import AgreedStop
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import host_mesh, make_mesh, shard_batch
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import save_config
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems.harr_config import NAME, SCRIPTED, HarrConfig
from qrag_jax.systems.harr_inputs import (
    AgentRewards,
    HarrModels,
    Inputs,
    llm_agent,
    load_inputs,
    open_models,
    reward_names,
)


class HarrPlayer:
    """Plays episodes by given parameters, on this host's devices."""

    def __init__(self, system: Harr) -> None:
        self._system, self._config, self._models = system, system.config, system.models
        self._mesh = system.own or system.mesh
        self._is_apart = self._mesh is not system.mesh
        self.counts = Counts()
        learner, loaded = system.learner, system.inputs.encoder
        self._of_params, self._of_base = learner.shardings.params, learner.base_shardings
        self._base = system.base[0] if system.base else None
        if self._is_apart:
            rules = self._config.runtime.rules(loaded.partition_rules)
            self._of_params = learner.parts.shardings(self._mesh, rules, loaded.trained).params
            if loaded.adapters is not None:
                self._of_base = placement.base_shardings(self._mesh, rules, loaded.stored)
                self._base = placement.place(loaded.stored, self._of_base)

    def here(self, params: Any) -> Any:
        """Parameters of training where they play; all hosts call this together."""
        return hosts.copied(params, self._of_params) if self._is_apart else params

    def starts(
        self, asked: Sequence[Gold], members: int, number: int, first: int = 0, apart: int = 1
    ) -> list[Start]:
        """Episodes whose draws depend on the step, the place in the batch and the member alone.

        Args:
            first, apart: places of the questions in the batch of all hosts: the first, and from
                one to the next.
        """
        key = jax.random.fold_in(jax.random.key(self._config.seed), number)
        places = first + apart * np.arange(len(asked), dtype=np.uint32)
        keys = np.asarray(draw_keys(key, places, members))
        return [
            Start(Task(question.id, question.question), place, keys[place, member])
            for place, question in enumerate(asked)
            for member in range(members)
        ]

    def play(
        self, params: Any, starts: Sequence[Start], stop: StopSignal, *, is_greedy: bool = False
    ) -> list[Episode]:
        """Plays episodes by these parameters, until few of them are broken."""
        rollout = self.rollout(params, stop, is_greedy=is_greedy)
        share = self._config.agent.max_broken_share
        advice = ADVICE + (self._models.kept if self._models is not None else "")
        patience = Patience(share, self.watch(stop), log, advice, Failed, HOPELESS)
        return patience.play(starts, rollout.play)

    def rollout(self, params: Any, stop: StopSignal, *, is_greedy: bool = False) -> AgentRollout:
        """What plays episodes by these parameters, once each."""
        whole = merge(params, self._base)
        rows, state = self._system.rows, self._config.state
        search = PoolSearch(
            self._tower.with_params(whole),
            self._system.inputs.index,
            StateText(state.stateful, None if state.instruction else "", rows.room, rows.count),
            rows,
            self._config.policy,
            is_greedy,
        )

        def one_at_a_time(asks: Sequence[Ask]) -> Sequence[Found | Failure]:
            with self._system.device:
                return search(asks)

        model = None if self._models is None else self._models.agents_own
        watch, play = self.watch(stop), self._config.agent.play
        rollout = AgentRollout(self._agent, one_at_a_time, model, play, watch)
        rollout.counts = self.counts
        return rollout

    def watch(self, stop: StopSignal) -> Checks:
        """Looks at the signal, and whether the language model was given up."""
        return stop if self._models is None else self._models.watch(stop)

    @cached_property
    def _agent(self) -> Agent:
        if self._config.agent.name == SCRIPTED:
            return Scripted(self._system.inputs.apart, self._config.agent.limits)
        assert self._models is not None
        if self._models.own_agent is not None:
            return self._models.own_agent
        assert self._models.generation is not None
        return llm_agent(self._config, self._models.generation)

    @cached_property
    def _tower(self) -> MeshTower:
        """The query encoder's programs; `rollout` gives it the parameters."""
        return MeshTower(
            self._mesh,
            merge(self._of_params, self._of_base),
            self._system.inputs.encoder.encoder,
            None,
            number=None,
            row_tokens=self._system.rows.max_tokens,
        )


_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
_EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it


check, before_devices = HarrConfig.of, HarrConfig.before_devices


@contextlib.contextmanager
def open_system(
    given: ConfigDict,
    run: Run,
    *,
    dry: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[Harr]:
    """Opens the system, and the server of its language model if it has one; see `systems`."""
    HarrConfig.resume(given, run)
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
        self.device = threading.Lock()
        self.train, self.profile = self.config.train, self.config.profile
        self.data = self.inputs.data
        self.provenance = self.models.provenance if self.models else {}
        self.told = Told(
            lambda numbers: [self.inputs.train[number].id for number in numbers],
            {"loss": ".3f", "return": ".2f"},
            "a lower --config.optimizer.learning_rate (it is "
            f"{self.config.optimizer.learning_rate:g}), or ",
        )
        config, inputs, searched = self.config, self.inputs, self.inputs.searched
        over = "a corpus that is not read"
        if searched is not None:
            over = f"{len(searched.corpus)} passages"
        self.line = (
            f"{len(inputs.train)} training questions, {len(inputs.dev)} scored every "
            f"{self.train.eval_every} steps, over {over}; "
            f"{self.train.steps} steps of {config.train.batch_size} questions × "
            f"{config.rule.members} episodes by the {config.agent.name} agent on "
            f"{self.mesh.size} {Platform.of(self.mesh).kind} device(s)"
        )

    def first_state(self) -> TrainState:
        trained = self.inputs.encoder.trained
        return self._parts.first_state(self.learner.shardings, trained, self.config.seed)

    def experience(self, run: Run, stop: StopSignal) -> Experience:
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
        return AgentExperience(order.at, playing, self._counted, done, pending=pending)

    def _batch(self, episodes: Sequence[Rewarded]) -> HopBatch:
        return shard_batch(self.mesh, hop_batch(episodes, self._shape, self.config.policy))

    def update(self, state: TrainState, episodes: HopBatch) -> tuple[TrainState, dict[str, Any]]:
        with self.device, jax.transfer_guard("disallow"):
            arguments = (state, episodes, *self.base)
            self._first_calls.before("update", self._update, arguments)
            updated = self._update(*arguments)
            if self.config.agent.staleness and Platform.of(self.mesh).on_cpu:
                # It has no queue that keeps the order of programs.
                jax.block_until_ready(updated)
            return updated

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        return self._scores.evaluate(self.player.here(state.params), step, stop)

    def programs(self) -> list[Program]:
        state = self._parts.shapes(self.inputs.encoder.trained)
        batch = batch_shapes(self.config.episodes, self._shape, self.config.policy)
        learner, hops = self.learner, self._shape.hops
        # Devices along `tensor` compute all their rows together (`models.compute.group`).
        together = self.config.episodes * learner.encoder.module.group.tensor // self.mesh.size
        loops = partial(even_rounds, learner.blocks, together * hops, self._shape.tokens)
        return [Program("update", self._update, (state, batch, *self.base), loops)]

    @cached_property
    def learner(self) -> QueryEncoder:
        """The query encoder, from which all programs are built."""
        config, loaded = self.config, self.inputs.encoder
        rules = config.runtime.rules(loaded.partition_rules)
        longest, platform = self.rows.max_tokens, Platform.of(self.mesh)
        of_episode, of_hop = reward_names(self.config.reward.rewards)
        weights = config.reward.rewards.weights
        return QueryEncoder(
            mesh=self.mesh,
            shardings=self._parts.shardings(self.mesh, rules, loaded.trained),
            encoder=loaded.encoder,
            blocks=choose_row_blocks(config.encoder, longest, platform),
            config=config.rule,
            tau=config.policy.tau,
            weights=(
                tuple(weights[name] for name in of_episode),
                tuple(weights[name] for name in of_hop),
            ),
            parts=self._parts,
            schedule=learning_rate_schedule(config.optimizer),
            base_shardings=placement.base_shardings(self.mesh, rules, loaded.base),
            is_fresh=not config.agent.staleness,
        )

    @cached_property
    def _first_calls(self) -> FirstCalls:
        return FirstCalls(self.mesh.local_devices, NAME, log)

    @cached_property
    def _parts(self) -> Parts:
        config = self.config
        critic, width = None, self.inputs.encoder.encoder.width
        if isinstance(config.rule, PPOConfig):
            rate = config.rule.critic_learning_rate
            critic = make_optimizer(dataclasses.replace(config.optimizer, learning_rate=rate))
            kl = config.rule.kl
        else:
            kl = config.rule.beta
        return Parts(make_optimizer(config.optimizer), critic, kl > 0, width)

    @cached_property
    def base(self) -> tuple[Any, ...]:
        """The base of adapters, placed; () if all weights are trained."""
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
        return HopShape(hops, self.rows.max_tokens, width, len(of_episode), len(of_hop))

    @cached_property
    def rows(self) -> QueryRows:
        """How states are cut to rows of tokens."""
        loaded = self.inputs.encoder
        encoder = loaded.encoder
        longest = min(self.config.state.max_tokens, encoder.max_positions)
        return QueryRows(loaded.tokenizer, encoder.state_opening, encoder.sep_id, longest)

    @cached_property
    def player(self) -> HarrPlayer:
        """Plays episodes, on this host's devices."""
        return HarrPlayer(self)

    @cached_property
    def rewards(self) -> AgentRewards:
        """Gives episodes their rewards."""
        models = self.models
        asked = (models.judge, models.reranker) if models is not None else ()
        return AgentRewards(self.config.reward.rewards, self.inputs.index.corpus, *asked)

    def _play(
        self, params: Any, numbers: Sequence[int], number: int, stop: StopSignal
    ) -> list[Rewarded]:
        """Plays the groups of these questions; see `experience.Playing`."""
        members = self.config.rule.members
        asked = [self.inputs.train[each] for each in numbers]
        starts = self.player.starts(asked, members, number, jax.process_index() * len(asked))
        played = self.player.play(params, starts, stop)
        golds = [each for each in asked for _ in range(members)]
        return self.rewards.rewarded(golds, played, self.player.watch(stop))

    @cached_property
    def _scores(self) -> AgentScores:
        asked = self.inputs.dev

        def play(params: Any, places: Sequence[int], stop: StopSignal) -> list[Episode]:
            own = [asked[place] for place in places]
            place, apart = jax.process_index(), jax.process_count()
            starts = self.player.starts(own, 1, _EVALUATED, place, apart)
            return self.player.play(params, starts, stop, is_greedy=True)

        return AgentScores(asked, play, self.config.eval.best_by)

    def _counted(self) -> dict[str, float]:
        counts, asked = self.player.counts, self.models.counts() if self.models is not None else {}
        own = np.array([counts.searches, counts.batches, counts.failed], np.float64)
        searches, batches, broken = hosts.of_each(own).sum(axis=0).tolist()
        return asked | {
            "searches_per_batch": searches / max(batches, 1),
            "broken_episodes": broken,
        }

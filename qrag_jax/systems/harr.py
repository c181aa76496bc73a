"""HARR (arXiv 2602.03645): GRPO or PPO trains a query encoder inside an agent that searches.

The agent and the document index do not change; the retriever is the policy, and the answer's score
is its reward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
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
from qrag_jax.evaluators.agents import agent_evaluation
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.feedback.rag import Gold
from qrag_jax.feedback.rewards import Checks, Patience
from qrag_jax.learners import placement
from qrag_jax.learners.config import PPOConfig
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.query_encoder import QueryEncoder, make_query_update
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.compute.lora import merge
from qrag_jax.rollouts.agents import ADVICE, HOPELESS, AgentRollout, Episode, PlayConfig, Start
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
from qrag_jax.runtime.mesh import host_mesh, make_mesh, row_devices, shard_batch
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import save_config
from qrag_jax.runtime.step_log import LogText
from qrag_jax.systems.harr_config import NAME, SCRIPTED, HarrConfig
from qrag_jax.systems.harr_inputs import HarrModels, Inputs, load_inputs, open_models, reward_names

_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
_EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it

check, before_devices = HarrConfig.of, HarrConfig.before_devices


@contextlib.contextmanager
def open_system(
    raw: ConfigDict, run: Run, *, dry: bool = False, devices: Sequence[jax.Device] | None = None
) -> Iterator[Harr]:
    """Opens the system, and the server of its language model if it has one; see `systems`."""
    HarrConfig.resume(raw, run)
    config = HarrConfig.of(raw)
    mesh = make_mesh(config.runtime.mesh, devices)
    own = mesh if devices is not None else host_mesh(config.runtime.mesh)
    hosts.check_play(config.runtime.mesh, own, config.agent.staleness)
    if config.episodes % mesh.size:
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
        run.begin(lambda: save_config(raw, run.config_path))
        yield Harr(config, mesh, inputs, models, placed=devices is None, own=own)


@dataclasses.dataclass
class Harr:
    """See `systems.System`. It plays episodes on this host's devices."""

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
        self.device, self.counts = threading.Lock(), Counts()
        config, inputs, searched = self.config, self.inputs, self.inputs.searched
        self.train, self.profile, self.data = config.train, config.profile, inputs.data
        self.provenance = self.models.provenance if self.models else {}
        self.log_text = LogText(
            lambda numbers: [inputs.train[number].id for number in numbers],
            {"loss": ".3f", "return": ".2f"},
            "a lower --config.optimizer.learning_rate (it is "
            f"{config.optimizer.learning_rate:g}), or ",
        )
        over = f"{len(searched.corpus)} passages" if searched else "a corpus that is not read"
        self.line = (
            f"{len(inputs.train)} training questions, {len(inputs.dev)} scored every "
            f"{self.train.eval_every} steps, over {over}; "
            f"{self.train.steps} steps of {config.train.batch_size} questions × "
            f"{config.rule.members} episodes by the {config.agent.name} agent on "
            f"{self.mesh.size} {Platform.of(self.mesh).kind} device(s)"
        )

    # ------------------------------------------------------------------ what is trained

    def first_state(self) -> TrainState:
        trained = self.inputs.encoder.trained
        return self._parts.first_state(self.learner.shardings, trained, self.config.seed)

    def update(self, state: TrainState, episodes: HopBatch) -> tuple[TrainState, dict[str, Any]]:
        with self.device, jax.transfer_guard("disallow"):
            arguments = (state, episodes, *self.base)
            self._first_calls.before("update", self._update, arguments)
            updated = self._update(*arguments)
            if self.config.agent.staleness and Platform.of(self.mesh).on_cpu:
                # It has no queue that keeps the order of programs.
                jax.block_until_ready(updated)
            return updated

    def programs(self) -> list[Program]:
        state = self._parts.shapes(self.inputs.encoder.trained)
        batch = batch_shapes(self.config.episodes, self._shape, self.config.policy)
        learner, hops = self.learner, self._shape.hops
        together = self.config.episodes // math.prod(row_devices(self.mesh))
        loops = partial(even_rounds, learner.blocks, together * hops, self._shape.tokens)
        return [Program("update", self._update, (state, batch, *self.base), loops)]

    @cached_property
    def learner(self) -> QueryEncoder:
        """The query encoder, from which all programs are built."""
        config, loaded = self.config, self.inputs.encoder
        rules = config.runtime.rules(loaded.partition_rules)
        longest, platform = self.rows.max_tokens, Platform.of(self.mesh)
        mixture = config.reward.rewards
        of_episode, of_hop = (
            tuple(mixture.weights[name] for name in names) for names in reward_names(mixture)
        )
        return QueryEncoder(
            mesh=self.mesh,
            shardings=self._parts.shardings(self.mesh, rules, loaded.trained),
            encoder=loaded.encoder,
            blocks=choose_row_blocks(config.encoder, longest, platform),
            config=config.rule,
            tau=config.policy.tau,
            weights=(of_episode, of_hop),
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
        config, rule, critic = self.config, self.config.rule, None
        if isinstance(rule, PPOConfig):
            rate = rule.critic_learning_rate
            critic = make_optimizer(dataclasses.replace(config.optimizer, learning_rate=rate))
        kl = rule.kl if isinstance(rule, PPOConfig) else rule.beta
        width = self.inputs.encoder.encoder.width
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
        width, hops = self.inputs.encoder.encoder.width, self.config.agent.max_hops
        return HopShape(hops, self.rows.max_tokens, width, len(of_episode), len(of_hop))

    @cached_property
    def rows(self) -> QueryRows:
        """How states are cut to rows of tokens."""
        loaded = self.inputs.encoder
        encoder = loaded.encoder
        longest = min(self.config.state.max_tokens, encoder.max_positions)
        return QueryRows(loaded.tokenizer, encoder.state_opening, encoder.sep_id, longest)

    # ------------------------------------------------------------------ what is played

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        # Made before a thread plays ahead: two threads would make two.
        config, _ = self.config, self._here
        if self.models is not None:
            self.models.wait(stop)
        shard = jax.process_index(), jax.process_count()
        order = QuestionOrder(len(self.inputs.train), config.train.batch_size, config.seed, shard)
        stale = config.agent.staleness
        playing = Playing(
            play=self._play,
            batch=lambda episodes, number: shard_batch(
                self.mesh, hop_batch(episodes, self._shape, config.policy)
            ),
            save=saved,
            restore=lambda kept: restored(kept, self.inputs.index.vectors),
            params=lambda state: _copied(state.params) if stale else self.here(state.params),
            staleness=stale,
            steps=config.train.steps,
        )
        done, pending = run.progress.batches or 0, run.progress.pending
        return AgentExperience(order.at, playing, self._counted, done, pending=pending)

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        golds, params = self.inputs.dev, self.here(state.params)

        def play(places: Sequence[int]) -> list[Episode]:
            part = [golds[place] for place in places]
            shard = jax.process_index(), jax.process_count()
            return self.play(params, self.starts(part, 1, _EVALUATED, *shard), stop, is_greedy=True)

        return agent_evaluation(step, golds, self.config.eval.best_by, play)

    def here(self, params: Any) -> Any:
        """Parameters of training where they play; all hosts call this together."""
        mesh, of_params, *_ = self._here
        return params if mesh is self.mesh else hosts.copied(params, of_params)

    @cached_property
    def _here(self) -> tuple[Mesh, Any, Any, Any]:
        """Where episodes are played: mesh, shardings of what is trained and of the base, base."""
        learner, loaded, mesh = self.learner, self.inputs.encoder, self.own or self.mesh
        if mesh is self.mesh:
            base = self.base[0] if self.base else None
            return mesh, learner.shardings.params, learner.base_shardings, base
        rules = self.config.runtime.rules(loaded.partition_rules)
        of_params = self._parts.shardings(mesh, rules, loaded.trained).params
        of_base = placement.base_shardings(mesh, rules, loaded.base)
        base = None if of_base is None else placement.place(loaded.stored, of_base)
        return mesh, of_params, of_base, base

    def starts(
        self, golds: Sequence[Gold], members: int, number: int, first: int = 0, apart: int = 1
    ) -> list[Start]:
        """Episodes whose draws depend on the step, the place in the batch and the member alone.

        Args:
            first, apart: places of the questions in the batch of all hosts: the first, and from
                one to the next.
        """
        key = jax.random.fold_in(jax.random.key(self.config.seed), number)
        places = first + apart * np.arange(len(golds), dtype=np.uint32)
        keys = np.asarray(draw_keys(key, places, members))
        return [
            Start(Task(question.id, question.question), place, keys[place, member])
            for place, question in enumerate(golds)
            for member in range(members)
        ]

    def play(
        self, params: Any, starts: Sequence[Start], stop: StopSignal, *, is_greedy: bool = False
    ) -> list[Episode]:
        """Plays episodes by these parameters, until few of them are broken."""
        config, rows, models, watch = self.config, self.rows, self.models, self.watch(stop)
        search = PoolSearch(
            self._tower.with_params(merge(params, self._here[-1])),
            self.inputs.index,
            StateText(
                config.state.stateful,
                None if config.state.instruction else "",
                rows.room,
                rows.count,
            ),
            rows,
            config.policy,
            is_greedy,
        )

        def one_at_a_time(asks: Sequence[Ask]) -> Sequence[Found | Failure]:
            with self.device:
                return search(asks)

        model = models.client if models is not None else None
        settings = PlayConfig(config.agent.attempts, config.agent.gather)
        rollout = AgentRollout(self._agent, one_at_a_time, model, settings, watch)
        rollout.counts = self.counts
        advice = ADVICE + (models.kept if models is not None else "")
        share = config.agent.max_broken_share
        return Patience(share, watch, log, advice, Failed, HOPELESS).play(starts, rollout.play)

    def watch(self, stop: StopSignal) -> Checks:
        """Looks at the signal, and whether the language model was given up."""
        return stop if self.models is None else self.models.watch(stop)

    def _play(
        self, params: Any, numbers: Sequence[int], number: int, stop: StopSignal
    ) -> list[Rewarded]:
        """Plays the groups of these questions; see `experience.Playing`."""
        assert self.models is not None
        members = self.config.rule.members
        golds = [self.inputs.train[each] for each in numbers]
        starts = self.starts(golds, members, number, jax.process_index() * len(golds))
        played = self.play(params, starts, stop)
        golds = [gold for gold in golds for _ in range(members)]
        return self.models.rewarded(golds, played, self.inputs.index.corpus, self.watch(stop))

    @cached_property
    def _agent(self) -> Agent:
        if self.config.agent.name == SCRIPTED:
            return Scripted(self.inputs.apart, self.config.agent.limits)
        assert self.models is not None
        return self.models.agent

    @cached_property
    def _tower(self) -> MeshTower:
        """The query encoder's programs; `play` gives it the parameters."""
        mesh, of_params, of_base, _ = self._here
        whole, encoder = merge(of_params, of_base), self.inputs.encoder.encoder
        return MeshTower(mesh, whole, encoder, None, number=None, row_tokens=self.rows.max_tokens)

    def _counted(self) -> dict[str, float]:
        counts, asked = self.counts, self.models.counts() if self.models is not None else {}
        own = np.array([counts.searches, counts.batches, counts.failed], np.float64)
        searches, batches, broken = hosts.of_each(own).sum(axis=0).tolist()
        return asked | {"searches_per_batch": searches / max(batches, 1), "broken_episodes": broken}

"""What all systems share whose policy is a language model: its weights, its stages, its play."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.evaluators.tool_scores import REWARD
from qrag_jax.feedback.llm import leave_room
from qrag_jax.learners import placement
from qrag_jax.learners.config import TokenGRPOConfig, TokenPPOConfig
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import episode_shardings, make_token_update, token_episodes
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import scaffold_of
from qrag_jax.models.files.model_folder import read_config
from qrag_jax.models.first_language_model import (
    FirstLanguageModel,
    named_folder,
    prepare_language_model,
)
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.experience import AgentExperience, Drawn, Experience, Playing, QuestionOrder
from qrag_jax.rollouts.schedule import Counts
from qrag_jax.rollouts.token_blocks import BlockShape, choose_shape
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import (
    DONE,
    BatchRules,
    TokenBatch,
    TokenTrajectory,
    Turn,
    token_batch,
)
from qrag_jax.runtime import hosts
from qrag_jax.runtime.aot import FirstCalls
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import host_mesh, make_mesh, put_whole, shardings_of
from qrag_jax.runtime.platform import Platform, ask_determinism
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import save_config
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems.episode_player import EpisodePlayer, TokenInputs
from qrag_jax.systems.served_policy import ServedPolicy, ServedSettings, Versioned, open_served
from qrag_jax.systems.token_config import StageSFTConfig, TokenConfig


class Stage(NamedTuple):
    """One stage of training."""

    kind: str
    policy: TokenPolicy[Any]
    update: Any
    begin: Any  # state → the state with which it begins behind another stage
    first: int


def model_of(
    config: TokenConfig,
    workdir: Path,
    mesh: Mesh,
    texts: Callable[[], Iterable[str]] | None,
    turn: int,
) -> tuple[FirstLanguageModel, Speech]:
    """The model of the run in `workdir`, and how it speaks.

    Args:
        texts: the tokenizer of a tiny model is trained on them; None: there are none.
        turn: most tokens that a turn may sample.
    """

    def known() -> Iterable[str]:
        if texts is None:
            raise InputError(
                "config.model.path is empty: a tiny model is made for questions that are made here "
                "or for scripted ones only; name a chat model's folder or hub name."
            )
        return texts()

    platform, room = Platform.of(mesh), config.sampling.room
    model = prepare_language_model(config.model, workdir, known, config.seed, platform=platform)
    loaded, thinking = model.loaded, {"": None, "on": True, "off": False}[config.model.thinking]
    if room > loaded.model.max_positions:
        raise InputError(
            f"config.sampling.room is {room}, but {model.folder} has "
            f"{loaded.model.max_positions} positions; lower it."
        )
    scaffold = scaffold_of(loaded.tokenizer, thinking=thinking)
    return model, Speech(loaded.tokenizer, scaffold, turn, room)


def check_room(config: TokenConfig, speech: Speech, name: str, prompt: Messages, more: int) -> None:
    """Refuses a prompt that leaves what is sampled no room."""
    tokens = len(speech.scaffold.opening(prompt))
    if tokens + more > config.sampling.room:
        raise InputError(
            f"the prompt of {name!r} has {tokens} tokens, {more} more may be sampled behind it, "
            f"and config.sampling.room is {config.sampling.room}; raise it, or shorten the prompt."
        )


def fingerprint(rows: Iterable[tuple[object, ...]]) -> str:
    """A digest of questions by what counts of each."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row}\0".encode())
    return digest.hexdigest()[:16]


_CHECKED = 8  # prompts by which a server that samples is checked
WARM_UP = 25  # a stage of imitation warms up for one part of so many
EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it
_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


Config = TypeVar("Config", bound=TokenConfig)
Inputs = TypeVar("Inputs", bound=TokenInputs)


@dataclasses.dataclass
class TokenSystem(abc.ABC, Generic[Config, Inputs]):
    """See `systems.System`."""

    SECTION: ClassVar[str]  # of the config: how often and how patiently episodes are played
    NAME: ClassVar[str]  # field `system` of the config
    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "return": ".2f"}  # metrics on the screen
    config: Config
    mesh: Mesh
    inputs: Inputs
    workdir: Path
    placed: bool = True  # else the mesh's devices are described, and only shapes are made
    # Saves the parameters at the end of a stage, with the steps done until then
    keep: Callable[[int, Any], None] = lambda step, params: None
    # What samples the episodes that are learned from; None: the device
    served: ServedPolicy | None = None
    # Of this host's devices, which play without the other hosts; None: there is one host
    own: Mesh | None = None

    def __post_init__(self) -> None:
        self.train, self.profile = self.config.train, self.config.profile
        self.data, self.provenance = self.inputs.data, dict[str, Any]()
        self.counts = Counts()
        self.told = Told(self._names, self.SHOWN, self._advice)
        self._step: int | None = None  # of the next update

    @classmethod
    def staleness(cls, config: Config) -> int:
        """K: updates between playing a batch and learning from it."""
        return getattr(getattr(config, cls.SECTION), "staleness", 0)

    @property
    @abc.abstractmethod
    def stages(self) -> Sequence[Stage]:
        """The stages, in their order; the first one begins with step 0."""

    @abc.abstractmethod
    def _longest(self, stage: Any) -> Any:
        """A batch of a stage whose rows are as long as they may be."""

    @abc.abstractmethod
    def _names(self, numbers: Sequence[int]) -> list[str]:
        """What people know the questions of a batch by."""

    @abc.abstractmethod
    def _evaluated(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the fixed questions of the training."""

    @abc.abstractmethod
    def _openings(self) -> Iterable[Messages]:
        """First prompts of questions, by which a server that samples is checked."""

    def check_server(self, stop: StopSignal) -> None:
        """Waits for the server that samples, and compares what it samples with the first weights.

        It does nothing if the device samples.
        """
        if self.served is None:
            return
        self.served.wait(stop)
        scaffold = self.inputs.speech.scaffold
        prompts = [
            np.array(scaffold.opening(messages), np.int32)
            for messages in itertools.islice(self._openings(), _CHECKED)
        ]
        params = self.player.here(self.untrained)
        distance = self.served.check(params, self.player.base, prompts, stop)
        log(f"the server's log-probabilities are {distance:.2g} nats a token from the trainer's")

    # ---------------------------------------------------------------- learning

    def make_stage(
        self,
        kind: str,
        algorithm: Any,
        *,
        optimizer: OptimizerConfig,
        first: int,
        step_of: Callable[[Any], Any],
        make_update: Callable[[TokenPolicy[Any]], Any] = make_token_update,
        weights: tuple[float, ...] = (),
        keeps_reference: bool = False,
        critic_optimizer: Any = None,
        rests_until: int = 0,
    ) -> Stage:
        """A stage of the run.

        Args:
            step_of: optimizer step of the run → that of the stage, on which the learning rate
                depends.
            make_update: makes the jitted update of a policy.
            critic_optimizer: None: there is no critic.
            rests_until: the step of the run before which the critic learns alone.
        """
        config, mesh, model = self.config, self.mesh, self.inputs.model
        loaded, width = model.loaded, model.loaded.model.trunk.config.hidden_size
        parts = Parts(make_optimizer(optimizer), critic_optimizer, keeps_reference, width)
        trunk, partition = loaded.model.trunk, config.runtime.rules(model.partition_rules)
        # Rewards teach the policy that sampled; what is imitated or preferred, the model itself.
        by_rewards = isinstance(algorithm, TokenGRPOConfig | TokenPPOConfig)
        temperature = config.sampling.temperature if by_rewards else 1.0
        rate = learning_rate_schedule(optimizer)
        of_base = None
        if model.base is not None:
            of_base = placement.base_shardings(mesh, partition, model.base)
        policy: TokenPolicy[Any] = TokenPolicy(
            mesh=mesh,
            shardings=parts.shardings(mesh, partition, model.trained),
            trunk=trunk,
            vocabulary=Vocabulary(temperature, products=trunk.precision.products),
            config=algorithm,
            weights=weights,
            parts=parts,
            schedule=lambda step: rate(step_of(step)),
            base_shardings=of_base,
            lora_scale=loaded.model.lora_scale,
            rests_until=rests_until,
        )
        begin = jax.jit(parts.next_stage, out_shardings=policy.shardings)
        return Stage(kind, policy, make_update(policy), begin, first)

    def first_state(self) -> TrainState:
        """See `System`."""
        policy = self.stages[0].policy
        return policy.parts.first_state(
            policy.shardings, self.inputs.model.trained, self.config.seed
        )

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

    def update(self, state: TrainState, episodes: Any) -> tuple[TrainState, Any]:
        """See `System`."""
        stage, state = self._at_stage(state)
        return self._learned(stage, state, episodes)

    def _at_stage(self, state: TrainState) -> tuple[Stage, TrainState]:
        """The stage of the next update, and the state, which begins anew with a later stage."""
        step = self._updates(state)
        stage = self.stage_at(step)
        if step == stage.first > 0:
            self.keep(step, state.params)
            state = stage.begin(state)
        self._step = step + 1
        return stage, state

    def stage_at(self, step: int) -> Stage:
        """The stage of a step, from 0."""
        return next(stage for stage in reversed(self.stages) if stage.first <= step)

    def _learned(
        self, stage: Stage, state: TrainState, episodes: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        arguments = (state, episodes, *self.base)
        with jax.transfer_guard("disallow"):
            self._first_calls.before(self._name(stage), stage.update, arguments)
            return stage.update(*arguments)

    def _updates(self, state: TrainState) -> int:
        """Updates that the state has seen; asked of the device once, which would wait each time."""
        if self._step is None:
            self._step = int(jax.device_get(state.step))
        return self._step

    @property
    def _latest(self) -> int:
        """The number of the latest step."""
        return max((self._step or 1) - 1, 0)

    def block_shape(self, batch: TokenBatch, members: int, *, whole: bool = False) -> BlockShape:
        """The shape of the blocks in which the rows of a batch are computed."""
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
        state = stage.policy.parts.shapes(self.inputs.model.trained)
        return Program(name, stage.update, (state, shapes, *self.base))

    # ---------------------------------------------------------------- play

    @cached_property
    def player(self) -> EpisodePlayer:
        """Plays episodes."""
        config, inputs = self.config, self.inputs
        how = config, self.SECTION, inputs, self._turn
        base = self.base[0] if self.base else None
        if self.own is None or self.own is self.mesh:
            return EpisodePlayer(*how, self.mesh, base, self.served, self.counts)
        model, rules_of = inputs.model, config.runtime.rules(inputs.model.partition_rules)
        shardings = shardings_of(self.own, rules_of, model.trained, model.trained)
        if model.base is not None:
            base = placement.place(
                model.base, placement.base_shardings(self.own, rules_of, model.base)
            )
        here = partial(hosts.copied, shardings=shardings)
        return EpisodePlayer(*how, self.own, base, self.served, self.counts, here)

    @property
    def _turn(self) -> int:
        """Most tokens of a turn that is learned from; 0: as many as in evaluation."""
        return 0

    def weights(self, state: TrainState) -> Any:
        """What plays: parameters, or a version of them for the server.

        Parameters that play while there are updates are copied, since updates overwrite them.
        """
        params = _copied(state.params) if self.staleness(self.config) else state.params
        return params if self.served is None else Versioned(params, self._updates(state))

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        """See `System`."""
        return self._evaluated(state.params, step, stop)

    # ---------------------------------------------------------------- what is told

    @property
    def _where(self) -> str:
        """Where the run computes and samples, for its line."""
        served = ", sampled by vLLM" if self.served else ""
        return f"on {self.mesh.size} {Platform.of(self.mesh).kind} device(s){served}"

    def counted(self) -> Counts:
        """What the episodes of all hosts needed; all hosts call this together."""
        own = np.array(dataclasses.astuple(self.counts))
        return Counts(*hosts.of_each(own).sum(axis=0).tolist())

    def _of_server(self) -> dict[str, float]:
        """What the server was asked, as metrics; {} if the device samples."""
        return self.served.counts() if self.served is not None else {}

    @property
    def _advice(self) -> str:
        rate = self.config.optimizer.learning_rate
        return f"a lower --config.optimizer.learning_rate (it is {rate:g}), or "


System = TypeVar("System", bound=TokenSystem[Any, Any])


@dataclasses.dataclass(frozen=True)
class Opening(Generic[System]):
    """How the runs of one system are opened; its methods are functions of the system's module."""

    system: type[System]
    # The module of its config: `load_config`, `FREE_FIELDS`, which may change when a run goes on,
    # and `PATHS` of data whose digests a checkpoint keeps
    fields: ModuleType
    # Reads settings, and refuses those that are wrong for any data
    config: Callable[[ConfigDict], Any]
    # (settings, the run's folder, a mesh of this host) → data and model; refuses those that cannot
    # be used
    load: Callable[[Any, Path, Mesh], Any]

    def check(self, given: ConfigDict) -> None:
        """Refuses values that are wrong for any data."""
        self.config(given)

    def before_devices(
        self, given: ConfigDict, *, dry: bool = False, described: bool = False
    ) -> str:
        """Sets how much of a GPU's memory JAX takes, and that its programs are deterministic."""
        config = self.config(given)
        if config.llm is not None and not dry:
            leave_room(config.llm)
        return ask_determinism(config.runtime.deterministic, described=described)

    @contextlib.contextmanager
    def open_system(
        self,
        given: ConfigDict,
        run: Run,
        *,
        dry: bool = False,
        devices: Sequence[jax.Device] | None = None,
    ) -> Iterator[System]:
        """Opens the system, and the server that samples if the config has one; see `systems`."""
        if run.has_begun:
            saved, fields = self.fields.load_config(run.config_path), self.fields
            run.check_config(saved, given, fields.FREE_FIELDS, fields.PATHS)
        config = self.config(given)
        mesh = make_mesh(config.runtime.mesh, devices)
        own = mesh if devices is not None else host_mesh(config.runtime.mesh)
        hosts.check_play(config.runtime.mesh, own, self.system.staleness(config))
        if config.model.path:
            read_config(named_folder(config.model.path))  # refused before the data are read
        inputs = self.load(config, run.workdir, own)
        run.begin(lambda: save_config(given, run.config_path))

        # The checkpoints are asked for when they are needed, and not made by a start that fails.
        def keep(step: int, params: Any) -> None:
            run.checkpoints.save_stage(step, params)

        with contextlib.ExitStack() as stack:
            served = None
            if config.llm is not None and not dry:
                staleness = self.system.staleness(config)
                sizes = config.model.lora.sizes
                settings = ServedSettings(config.llm, config.sampling, sizes, staleness)
                served = stack.enter_context(
                    open_served(settings, inputs.model, inputs.speech, run.workdir)
                )
            yield self.system(
                config,
                mesh,
                inputs,
                run.workdir,
                placed=devices is None,
                keep=keep,
                served=served,
                own=own,
            )


class StagedOrder(NamedTuple):
    """The order of questions, see `agent_experience.QuestionOrder`; each stage has its own."""

    orders: Mapping[int, QuestionOrder]  # first step of a stage → its order

    def at(self, step: int) -> Drawn:
        """The questions of the batch that step `step` learns from, from 0."""
        first = max(first for first in self.orders if first <= step)
        return self.orders[first].at(step - first)


@dataclasses.dataclass
class BatchSystem(TokenSystem[Config, Inputs]):
    """A system that plays a batch of questions for each update: RLVR and DeepRetrieval."""

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages, in their order."""
        return [self._stage(kind) for kind in self.config.stages]

    @abc.abstractmethod
    def _stage(self, kind: str) -> Stage:
        """A stage of this kind."""

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """See `System`; a server that samples is checked first."""
        self.check_server(stop)
        done, pending = run.progress.batches or 0, run.progress.pending
        return AgentExperience(self._order, self._playing(), self._counted, done, pending=pending)

    @cached_property
    def _order(self) -> Any:
        """The order of questions."""
        orders = {}
        for stage in self.stages:
            count, first = self._questions(stage)
            order = QuestionOrder(count, self._groups(stage), self.config.seed, first=first)
            orders[stage.first] = order
        return StagedOrder(orders)

    def _questions(self, stage: Stage) -> tuple[int, Sequence[int] | None]:
        """How many questions a stage has, and their order in the first epoch; None: shuffled."""
        return len(self.inputs.train), None

    @abc.abstractmethod
    def _counted(self) -> dict[str, float]:
        """Further metrics, since this start of the run."""

    def _playing(self) -> Playing:
        """How batches are played."""
        return Playing(
            play=self._play,
            batch=lambda trajectories, step: self._batch(self.stage_at(step), trajectories),
            save=TokenTrajectory.to_json,
            restore=TokenTrajectory.from_json,
            params=self.weights,
            staleness=self.staleness(self.config),
            steps=self.train.steps,
        )

    @abc.abstractmethod
    def _play(
        self, weights: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        """See `experience.Playing`."""

    @property
    def _learned_parts(self) -> tuple[str, ...]:
        """The parts of rewards that are learned from."""
        return (REWARD,)

    def _batch(self, stage: Stage, trajectories: Sequence[TokenTrajectory]) -> Any:
        """What an update of a stage takes, on the devices."""
        return put_whole(self._arrays(stage, trajectories), episode_shardings(self.mesh))

    def _arrays(self, stage: Stage, trajectories: Sequence[TokenTrajectory]) -> Any:
        """What an update takes, on the host."""
        rules = BatchRules(
            members=stage.policy.config.members,
            parts=self._learned_parts,
            truncated=getattr(self.config, self.SECTION).truncated,
            longest=self.config.sampling.room,
        )
        batch = token_batch(trajectories, rules)
        return self._episodes(stage, batch, self.block_shape(batch, rules.members))

    def _episodes(self, stage: Stage, batch: TokenBatch, shape: BlockShape) -> Any:
        return token_episodes(stage.policy, batch, shape)

    @abc.abstractmethod
    def _groups(self, stage: Stage) -> int:
        """Questions of a batch of a stage."""

    def _sampled(self, stage: Stage) -> int:
        """Tokens of the room that are sampled, in the longest episode that is planned with."""
        return self.config.sampling.room // 2

    def _longest(self, stage: Stage) -> Any:
        """See `TokenSystem`."""
        sampled = self._sampled(stage)
        ids, log_probs = np.zeros(sampled, np.int32), np.zeros(sampled, np.float32)
        before = np.zeros(self.config.sampling.room - sampled, np.int32)
        trajectories = [
            TokenTrajectory(
                question=group,
                member=member,
                attempt=1,
                segments=((Turn(before, ids, log_probs, STOP),),),
                status=DONE,
                parts={**dict.fromkeys(self._learned_parts, 0.0), REWARD: float(member)},
                facts={},
            )
            for group in range(self._groups(stage))
            for member in range(stage.policy.config.members)
        ]
        return self._arrays(stage, trajectories)


def means_of_parts(trajectories: Sequence[TokenTrajectory]) -> dict[str, float]:
    """Means of the parts of rewards over the episodes that have them."""
    names = dict.fromkeys(name for each in trajectories for name in each.parts)
    return {
        name: float(np.mean([each.parts[name] for each in trajectories if name in each.parts]))
        for name in names
    }


def imitation_optimizer(
    optimizer: OptimizerConfig, stage: StageSFTConfig, steps: int
) -> OptimizerConfig:
    """The optimizer of a stage of imitation before that of rewards.

    Args:
        steps: of which one part of `WARM_UP` warms up.
    """
    return dataclasses.replace(
        optimizer,
        learning_rate=stage.learning_rate,
        total_steps=stage.steps * stage.epochs,
        schedule="cosine",
        warmup_steps=steps // WARM_UP,
        final_ratio=0.1,
        clip_norm=1.0,
    )

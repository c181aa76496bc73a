"""What all systems share whose policy is a language model: its weights, its stages, its play."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data import reading, sample
from qrag_jax.environments.episode import Agent, Failed
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewards import Checks, Patience
from qrag_jax.learners import token_policy
from qrag_jax.learners.config import NONE, PreferenceConfig, TokenPPOConfig
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import scaffold_of
from qrag_jax.models.compute.lora import merge
from qrag_jax.models.files.model_folder import read_config
from qrag_jax.models.first_language_model import named_folder, prepare_language_model
from qrag_jax.models.pretrained import LoadedLanguageModel
from qrag_jax.models.trunks.transformer import Params
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts import token_episodes, trajectories
from qrag_jax.rollouts.device_sampler import DeviceSampler, RoundSampler
from qrag_jax.rollouts.experience import AgentExperience, Experience, Playing, questions_at
from qrag_jax.rollouts.token_episodes import Counts
from qrag_jax.rollouts.trajectories import (
    BlockShape,
    TokenTrajectory,
    Turn,
    Versioned,
    choose_shape,
)
from qrag_jax.runtime import aot, hosts, whole_files
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import put_whole
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import DEV, Run, log
from qrag_jax.systems.config import drawn
from qrag_jax.systems.token_config import StagePlan, TokenConfig
from qrag_jax.systems.training import MeshSystem, Opening

if TYPE_CHECKING:
    from qrag_jax.rollouts.served_policy import ServedPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenInputs:
    model: LoadedLanguageModel  # what is trained
    speech: token_episodes.Speech  # between text and ids
    agent: Any = None  # the environment; None: it is played elsewhere
    library: Any = None  # what is searched; None likewise
    functions: Any = None  # of the user, as tools; None: there are none
    train: Any = ()  # what is learned from
    dev: Any = ()  # what chooses the best checkpoint, and what is reported unless there is a test
    test: Any = ()
    drawn: Any = None  # of all evaluation questions, those of `dev`; see `systems.config.drawn`
    script: Any = None  # what is demonstrated; None: nothing is
    pairs: Sequence[tuple[str, str, str]] = ()  # of LeReT, from a file
    data: dict[str, str]  # content keys


class Stage(NamedTuple):
    plan: StagePlan
    policy: token_policy.TokenPolicy
    update: Any


def token_inputs(
    config: TokenConfig,
    workdir: Path,
    mesh: Mesh,
    *,
    turn: int,
    data: Mapping[str, str],
    train: Sequence[Any] = (),
    dev: Sequence[Any] = (),
    test: Sequence[Any] = (),
    digest: Callable[[Sequence[Any]], str] | None = None,
    agent: Any = None,
    asks: Callable[[Any], Iterable[Messages]] = lambda task: (),
    sampled: int = 0,
    texts: Callable[[], Iterable[str]] | None = None,
    script: Any = None,
    **parts: Any,
) -> TokenInputs:
    """What the run in `workdir` reads, its model included; `parts`: further fields.

    Args:
        turn: most tokens that a turn may sample.
        data: content keys besides those of the questions.
        dev, test: all of them, of which those are drawn that `config.eval` asks for.
        digest: the content key of questions; None: it is in `data`.
        asks: the first prompts of a question; the room must suffice for the longest one's.
        sampled: tokens for which there must be room behind each of these; 0: a turn's.
        texts: the tokenizer of a tiny model is trained on them; None: on those of the script.
    """

    def known() -> Iterable[str]:
        if texts is None and script is None:
            raise InputError("config.model.path is empty; name one, or script the questions.")
        return spoken(script.talks(config, agent)) if texts is None else texts()

    platform, room = Platform.of(mesh), config.sampling.room
    model = prepare_language_model(config.model, workdir, known, config.seed, platform=platform)
    if room > (positions := model.model.max_positions):
        raise InputError(f"config.sampling.room {room} is above {positions} positions; lower it.")
    scaffold = scaffold_of(model.tokenizer, thinking=config.thinking)
    more = sampled or turn
    longest = max((*train, *dev, *test), key=lambda task: len(task.question.encode()))
    for prompt in asks(longest):
        tokens = len(scaffold.opening(prompt))
        if tokens + more > room:
            raise InputError(
                f"the prompt of {longest.id!r} has {tokens} tokens, {more} more may be sampled "
                f"behind it, and config.sampling.room is {room}; raise it, or shorten the prompt."
            )
    keys = {**data, "model": whole_files.model_digest(model.folder, log)}
    if digest is not None:
        keys |= {"questions": digest(train), DEV: digest(dev)}
    shown, tested = (drawn([task.id for task in tasks], config.eval) for tasks in (dev, test))
    return TokenInputs(
        model=model,
        speech=token_episodes.Speech(model.tokenizer, scaffold, turn, room),
        agent=agent,
        train=train,
        dev=[dev[place] for place in shown.places],
        test=[test[place] for place in tested.places],
        drawn=shown,
        script=script if config.IMITATION in config.stages else None,
        data=keys,
        **parts,
    )


def read_samples(text: str, *, from_corpus: bool = False) -> list[sample.Sample]:
    """The questions of parts of data, with a line for each."""
    samples, reports = reading.read_parts(text, from_corpus=from_corpus)
    for report in reports:
        log(report.summary())
    return samples


def fingerprint(rows: Iterable[tuple[object, ...]]) -> str:
    """A digest of questions by what counts of each."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row}\0".encode())
    return digest.hexdigest()[:16]


_CHECKED = 8  # prompts by which a server that samples is checked
EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it
PREDICTED = 2**30  # the same, of predictions; each part has the next
_FAILED = (
    "see why in their messages (a rerank service that does not answer, for example), or raise "
    "config.{section}.max_failed_share"
)
_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def spoken(talks: Iterable[token_episodes.Talk]) -> Iterator[str]:
    """All texts of scripted episodes, on which a tiny model's tokenizer is trained."""
    for talk in talks:
        for messages, said in talk.turns:
            yield from (text for _, text in messages)
            yield said


def in_parts(play: Callable[..., Any], size: int, stop: StopSignal) -> Callable[..., Any]:
    """(parameters, a part, number of its first) → its rows, by draws that depend on the part.

    `size`: asked of a part; 0: all at once, by the draws of evaluations in training.
    """

    def play_part(params: Any, part: Sequence[Any], first: int) -> Any:
        stream = PREDICTED + first // size if size else EVALUATED
        return play(params, part, stop, stream)

    return play_part


def starts_of(tasks: Sequence[Any], keys: np.ndarray) -> list[token_episodes.Start]:
    """Episodes of these tasks, those of a task side by side; keys uint32 `[task, member, 2]`."""
    of_tasks = zip(tasks, keys, strict=True)
    return [token_episodes.Start(task, key) for task, row in of_tasks for key in row]


Config = TypeVar("Config", bound=TokenConfig)


@dataclasses.dataclass(kw_only=True)
class TokenSystem(MeshSystem[Config]):
    """See `systems.System`."""

    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "return": ".2f"}  # metrics on the screen
    TITLE: ClassVar[str]  # of the system, and what its models learn, for readers of a model's card
    LEARNED: ClassVar[str]
    # (settings, the run's folder, a mesh of this host, what is asked) → `TokenInputs`
    LOAD: ClassVar[Callable[..., TokenInputs]]
    # What samples the episodes that are learned from; None: the device
    served: ServedPolicy | None = None
    # The order of the questions in the first epoch of rewards; None: shuffled
    first_epoch: Sequence[int] | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data, self.shown = self.inputs.data, self.SHOWN
        self.counts = Counts()  # of what was played on this host
        self._imitation = getattr(self.config, self.config.IMITATION)
        stages = (f"{plan.steps} steps of {plan.kind}" for plan in self.config.plan)
        self.steps = ", then ".join(stages)  # for the line of the run

    @classmethod
    def check_mesh(cls, config: TokenConfig, mesh: Mesh, local_mesh: Mesh) -> None:
        hosts.check_play(config.runtime.mesh, local_mesh, config.staleness)

    @classmethod
    def parts(cls, at: Opening) -> dict[str, Any]:
        """See `MeshSystem`; a server samples in training alone."""
        config: Any = at.config
        if config.model.path:
            read_config(named_folder(config.model.path))  # refused before the data are read
        asked = {} if at.asked is None else {"trains": False, **at.asked}
        inputs = cls.LOAD(config, at.workdir, at.mesh, **asked)
        if asked or at.dry or config.llm is None:
            return {"inputs": inputs}
        from qrag_jax.rollouts.served_policy import ServedPolicy  # most runs have no server

        served = ServedPolicy(
            inputs.model,
            inputs.speech,
            at.workdir,
            llm=config.llm,
            sampling=config.sampling,
            lora=config.model.lora.sizes,
            staleness=config.staleness,
        )
        at.stack.enter_context(served.open())
        return {"inputs": inputs, "served": served}

    @classmethod
    def listed(cls, questions: str) -> dict[str, Any]:
        """What `predict --questions` asks if it is a file; {}: it is a field of the config."""
        return {}

    def without_result(self, rows: Sequence[Any]) -> list[str]:
        """Describes predicted rows that came to nothing, a line a reason."""
        return []

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages, in their order; those of a kind differ in their first step alone."""
        firsts = {plan.kind: plan for plan in reversed(self.config.plan)}
        kinds = {kind: self._first_stage(first) for kind, first in firsts.items()}
        return [kinds[plan.kind]._replace(plan=plan) for plan in self.config.plan]

    def rewarded(
        self,
        weights: Any,
        tasks: Sequence[Any],
        numbers: Sequence[int],
        keys: np.ndarray,
        stop: StopSignal,
        **how: Any,
    ) -> list[TokenTrajectory]:
        """Plays questions of these numbers, see `episodes`; their episodes with their rewards."""
        episodes = self.episodes(weights, tasks, keys, stop, **how)
        asked, members = self.judged_by(tasks, stop), keys.shape[1]
        places = [divmod(place, members) for place in range(len(episodes))]
        return [
            self.trajectory(episode, (numbers[n], member), *asked[n])
            for episode, (n, member) in zip(episodes, places, strict=True)
        ]

    def judged_by(self, tasks: Sequence[Any], stop: StopSignal) -> Sequence[tuple[Any, ...]]:
        """What rewards of each task depend on."""
        return [(task,) for task in tasks]

    def trajectory(
        self, episode: token_episodes.Episode, of: tuple[int, int], task: Any, *more: Any
    ) -> TokenTrajectory:
        """A played episode with the parts of its reward; none if what gives them failed.

        `of` are the numbers of its question, and of it among the episodes of this question; `more`
        is of `judged_by`.
        """
        raise NotImplementedError

    def _played(
        self, weights: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        """What is learned from in a stage that does not imitate; see `experience.Playing`."""
        tasks = [self.inputs.train[number] for number in numbers]
        keys = self.keys(step, len(tasks), self.config.rule.members)
        return self.rewarded(weights, tasks, numbers, keys, stop)

    def _openings(self) -> Iterable[Messages]:
        """First prompts of questions, by which a server that samples is checked."""
        for task in self.inputs.train:
            yield next(self.inputs.agent.play(task)).messages

    @abc.abstractmethod
    def _counted(self, counts: Counts) -> dict[str, float]:
        """Further metrics, since this start of the run; `counts` are of all hosts."""

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
        distance = self.served.check(self.here(self.untrained), self._here[1], prompts, stop)
        log(f"the server's log-probabilities are {distance:.2g} nats a token from the trainer's")

    # ---------------------------------------------------------------- learning

    def _first_stage(self, plan: StagePlan) -> Stage:
        """The first stage of its kind."""
        config, model = self.config, self.inputs.model
        algorithm, optimizer = config.algorithm_of(plan.kind), config.optimizer_of(plan.kind)
        # One state serves all stages, so all of them have a reference and a critic if one does.
        rule, critic, kl = config.rule if config.has_rewards else None, None, 0.0
        ppo = rule if isinstance(rule, TokenPPOConfig) else None
        if rule is not None:
            kl = rule.kl if ppo else rule.beta
        if ppo and ppo.critic != NONE:
            rate = ppo.critic_learning_rate
            critic = make_optimizer(dataclasses.replace(config.optimizer, learning_rate=rate))
        width = model.trunk.config.hidden_size
        parts = Parts(make_optimizer(optimizer), critic, kl > 0, width)
        # Rewards teach the policy that sampled; what is imitated or preferred, the model itself.
        by_rewards = algorithm is config.rule
        temperature = config.sampling.temperature if by_rewards else 1.0
        # The learning rate depends on the optimizer steps of the stage. Stages of a kind begin
        # again after as many as an iteration has.
        firsts = [stage.first for stage in config.plan if stage.kind == plan.kind]
        period = firsts[1] - firsts[0] if len(firsts) > 1 else config.train.steps
        schedule, updates = learning_rate_schedule(optimizer), algorithm.updates_per_batch
        policy: token_policy.TokenPolicy = token_policy.TokenPolicy.of(
            self.mesh,
            model,
            parts,
            trunk=model.trunk,
            vocabulary=Vocabulary(temperature, products=model.trunk.precision.products),
            config=algorithm,
            schedule=lambda step: schedule((step - plan.first * updates) % (period * updates)),
            lora_scale=model.model.lora_scale,
            rests_until=plan.first + ppo.critic_warmup if ppo and by_rewards else 0,
        )
        return Stage(plan, policy, token_policy.make_token_update(policy))

    @property
    def learner(self) -> token_policy.TokenPolicy:
        return self.stages[0].policy

    def update(self, state: TrainState, episodes: Any) -> tuple[TrainState, dict[str, Any]]:
        """See `System`; the state begins again with a later stage."""
        step = self._updates(state)
        stage = self.stage_at(step)
        if step == stage.plan.first > 0:
            self.keep(step, state.params)
            state = stage.policy.next_stage(state)
        self._step = step + 1
        arguments = (state, episodes, *self.base)
        return self._call(self._program_name(stage), stage.update, arguments)

    def stage_at(self, step: int) -> Stage:
        """The stage of a step, from 0."""
        return next(stage for stage in reversed(self.stages) if stage.plan.first <= step)

    def programs(self) -> list[aot.Program]:
        """See `System`: the updates by one batch of the longest rows there may be."""
        # Shapes alone: the devices of a dry run may be described ones. The stages of a kind have
        # one update.
        programs = []
        for stage in {stage.plan.kind: stage for stage in reversed(self.stages)}.values():
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._longest(stage)
            )
            state = stage.policy.parts.shapes(self.inputs.model.trained)
            trunk, sampled = self.inputs.model.trunk, self._sampled(stage)
            rows = self._size(stage) * stage.policy.config.members
            once = trunk.config.flops(rows, self.config.sampling.room, rows * sampled)
            arguments, dtype = (state, shapes, *self.base), trunk.precision.products.name
            flops = stage.policy.update_passes * once
            name = self._program_name(stage)
            programs.append(aot.Program(name, stage.update, arguments, flops, dtype))
        return programs[::-1]

    @staticmethod
    def _program_name(stage: Stage) -> str:
        return f"update by {type(stage.policy.config).__name__}"

    # ---------------------------------------------------------------- batches

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        self.check_server(stop)
        done, pending = run.progress.batches or 0, run.progress.pending
        playing, counts = self.playing(), self.counted
        return AgentExperience(self.questions, playing, counts, done, pending=pending)

    def playing(self) -> Playing:
        return Playing(
            play=self._play,
            batch=lambda played, step: self._batch(self.stage_at(step), played),
            save=TokenTrajectory.to_json,
            restore=TokenTrajectory.from_json,
            params=self.weights,
            staleness=self.config.staleness,
            steps=self.train.steps,
            prepare=self.prepare,
        )

    def prepare(self, state: TrainState, step: int, stop: StopSignal) -> None:
        """Makes what the questions of a step depend on; see `experience.Playing`."""

    def questions(self, step: int) -> np.ndarray:
        """See `AgentExperience`."""
        stage = self.stage_at(step)
        asked, first = self.inputs.train, self.first_epoch
        if self._imitates(stage):
            asked, first = self.inputs.script, None
        how = len(asked), self._size(stage), self.config.seed
        return questions_at(step - stage.plan.first, *how, first=first)

    def _size(self, stage: Stage) -> int:
        """Groups of a batch."""
        algorithm = stage.policy.config
        return self.config.groups if algorithm is self.config.rule else algorithm.batch_size

    def _play(
        self, weights: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        if not self._imitates(self.stage_at(step)):
            return self._played(weights, numbers, step, stop)
        inputs, first, played = self.inputs, step * self._imitation.batch_size, []
        for number, episode in inputs.script.episodes(self.config, inputs, numbers, first):
            if self._imitation.observed:
                episode = token_episodes.all_sampled(episode)
            at, parts = (number, 0, 1), {trajectories.REWARD: 0.0}
            played.append(TokenTrajectory(*at, episode.segments, episode.status, parts))
        return played

    def _batch(self, stage: Stage, played: Sequence[TokenTrajectory], *how: Any) -> Any:
        """What an update takes; `how`: see `_arrays`."""
        arrays = self._arrays(stage, played, *how)
        return put_whole(arrays, token_policy.episode_shardings(self.mesh))

    def _arrays(
        self,
        stage: Stage,
        played: Sequence[TokenTrajectory],
        shape: BlockShape | None = None,
        reference: np.ndarray | None = None,
    ) -> Any:
        """What an update takes, on the host.

        Args:
            shape: of its blocks; None: one that suits these episodes.
            reference: float32 `[N]`, log-probabilities of the rows of pairs; None: zeros.
        """
        batch = self.token_rows(stage, played)
        shape = shape or self.block_shape(stage, batch)
        if not isinstance(stage.policy.config, PreferenceConfig):
            return token_policy.token_episodes(stage.policy, batch, shape)
        if reference is None:
            reference = np.zeros(len(played), np.float32)
        return token_policy.pair_episodes(stage.policy, batch, shape, reference)

    def token_rows(
        self, stage: Stage, played: Sequence[TokenTrajectory]
    ) -> trajectories.TokenBatch:
        return trajectories.token_batch(
            played,
            members=stage.policy.config.members,
            truncated=getattr(self.config.played, "truncated", trajectories.SCORED),
        )

    def block_shape(self, stage: Stage, batch: trajectories.TokenBatch) -> BlockShape:
        """The shape of the blocks in which rows like these are computed."""
        algorithm, room = stage.policy.config, self.config.sampling.room
        tokens = self.config.model.tokens(Platform.of(self.mesh))
        whole = isinstance(algorithm, PreferenceConfig)
        return choose_shape(batch, tokens, algorithm.members, room=room, whole=whole)

    def _sampled(self, stage: Stage) -> int:
        """Tokens of the room that are sampled, in the longest episode that is planned with."""
        return self.config.sampling.room // 2

    def _longest(self, stage: Stage) -> Any:
        """A batch of one turn in each episode, which fills the room."""
        sampled = self._sampled(stage)
        ids, log_probs = np.zeros(sampled, np.int32), np.zeros(sampled, np.float32)
        before = np.zeros(self.config.sampling.room - sampled, np.int32)
        segments = ((Turn(before, ids, log_probs, trajectories.STOP),),)
        played = [
            TokenTrajectory(
                group, member, 1, segments, trajectories.DONE, {trajectories.REWARD: float(member)}
            )
            for group in range(self._size(stage))
            for member in range(stage.policy.config.members)
        ]
        return self._arrays(stage, played)

    # ---------------------------------------------------------------- play

    def weights(self, state: TrainState) -> Any:
        """What plays: parameters, or a version of them for the server.

        Parameters that play while there are updates are copied, since updates overwrite them.
        """
        params = _copied(state.params) if self.config.staleness else state.params
        return params if self.served is None else Versioned(params, self._updates(state))

    def keys(self, step: int, tasks: int, members: int) -> np.ndarray:
        """uint32 `[task, member, 2]`, of draws that depend on the step and on the place alone."""
        key = jax.random.fold_in(jax.random.key(self.config.seed), step)
        keys = np.asarray(jax.random.key_data(jax.random.split(key, tasks * members)))
        return keys.reshape(tasks, members, -1)

    def episodes(
        self, weights: Any, tasks: Sequence[Any], keys: np.ndarray, stop: StopSignal, **how: Any
    ) -> list[token_episodes.Episode]:
        """Plays tasks, the episodes of each side by side; keys uint32 `[task, member, 2]`.

        `how`: see `play`.
        """
        return self.play(weights, starts_of(tasks, keys), stop, **how)

    def play(
        self,
        weights: Params | Versioned,
        starts: Sequence[token_episodes.Start],
        stop: StopSignal,
        *,
        greedy: bool = False,
        library: token_episodes.Library | None = None,
        agent: Agent | None = None,
        turn: int = 0,
    ) -> list[token_episodes.Episode]:
        """Plays by parameters on the devices, or by a version of them, which the server is given.

        Of several hosts, each plays a part, and has all episodes.

        Args:
            greedy: the likeliest tokens, by the devices; else they are drawn.
            library, agent: what the tools read, the environment; None: those of the inputs.
            turn: most tokens that a turn may sample; 0: those of the inputs.
        """
        speech, tools = self.inputs.speech, library or self.inputs.library
        speech = dataclasses.replace(speech, turn=turn or speech.turn)
        acting = self.acting(weights, stop, greedy=greedy)

        def play_own(local_starts: Sequence[token_episodes.Start]) -> list[token_episodes.Episode]:
            sampler, watch = acting()
            rollout = token_episodes.AgentRollout(
                agent or self.inputs.agent,
                stop=watch,
                attempts=self.config.played.attempts,
                counts=self.counts,
                sampler=sampler,
                speech=speech,
                library=tools,
                functions=self.inputs.functions,
            )

            def play(starts: Sequence[token_episodes.Start]) -> list[token_episodes.Episode]:
                if isinstance(weights, Versioned):
                    assert self.served is not None
                    self.served.bring_back(sampler, stop)
                return rollout.play(starts)

            return self.patience(watch).play(local_starts, play)

        return token_episodes.played_by_all(starts, play_own)

    def acting(
        self, weights: Params | Versioned, stop: StopSignal, *, greedy: bool
    ) -> Callable[[], tuple[Any, Checks]]:
        """Brings weights to what samples; all hosts call this together.

        Returns:
            What gives a host its sampler, and what is checked while it samples.
        """
        if isinstance(weights, Versioned):
            served, here = self.served, weights._replace(params=self.here(weights.params))
            assert served is not None
            return lambda: (served.sampler(here, stop), served.watch(stop))
        whole = merge(self.here(weights), self._here[1])
        reuse = self.config.TURNS and self.config.sampling.reuse
        return lambda: (RoundSampler(self._samplers[greedy], whole, reuse=reuse), stop)

    def patience(self, stop: Checks, broken: type = Failed, advice: str = _FAILED) -> Patience:
        """What plays again while too many are broken.

        Args:
            broken: the class of what an `ended` is if it broke.
            advice: what to do if playing again is in vain; `{section}` is that of the config.
        """
        config, advice = self.config, advice.format(section=self.config.PLAYED)
        return Patience(config.played.max_failed_share, stop, log, advice, broken)

    @cached_property
    def _samplers(self) -> dict[bool, DeviceSampler]:
        model, sampling = self.inputs.model.model, self.config.sampling
        model = dataclasses.replace(model, stop_ids=self.inputs.speech.scaffold.stop_ids)
        ways = {False: sampling, True: dataclasses.replace(sampling, temperature=0.0)}
        mesh = self.local_mesh or self.mesh
        return {greedy: DeviceSampler(model, how, mesh) for greedy, how in ways.items()}

    # ---------------------------------------------------------------- what a run prints

    @property
    def _where(self) -> str:
        """Where the run computes and samples, for its line."""
        served = ", sampled by vLLM" if self.served else ""
        return f"on {self.mesh.size} {Platform.of(self.mesh).kind} device(s){served}"

    def counted(self) -> dict[str, float]:
        """Further metrics, since this start of the run; all hosts call this together."""
        local_counts = np.array(dataclasses.astuple(self.counts))
        counts = Counts(*hosts.of_each(local_counts).sum(axis=0).tolist())
        served = self.served.counts() if self.served is not None else {}
        return served | self._counted(counts)

    def names(self, numbers: Sequence[int], step: int) -> list[str]:
        if self._imitates(self.stage_at(step - 1)):
            return [f"demonstration {number}" for number in numbers]
        return super().names(numbers, step)

    def _imitates(self, stage: Stage) -> bool:
        return stage.plan.kind == self.config.IMITATION

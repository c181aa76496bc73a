"""Q-RAG (arXiv 2511.07328): PQN trains two towers to take chunks of a document one by one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.data import noise
from qrag_jax.data.episodes import training_batches
from qrag_jax.data.sample import OF_VALUES
from qrag_jax.evaluators.episodes import EpisodeEvaluator, Player, TrainingScores, make_play
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.feedback.facts import ANSWER_IN_CHUNK, NEEDED, fact_feedback
from qrag_jax.feedback.llm import (
    DeferredReward,
    ModelReward,
    OwnReward,
    PendingService,
    Rewards,
    open_own,
    open_service,
)
from qrag_jax.learners.imitation import ImitationGradient
from qrag_jax.learners.state import TrainState
from qrag_jax.learners.two_towers import (
    TwoTowers,
    make_learn_step,
    make_play_step,
    make_step,
    make_train_step,
    scored_shapes,
)
from qrag_jax.llm.server.opening import Place
from qrag_jax.rollouts.block_shapes import choose_block_shapes, loop_rounds
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.rollouts.experience import Asking, Batches, Deferred, Experience, Fused, Staged
from qrag_jax.runtime.aot import FirstCalls, Loops, Program
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import DEV, Run, log
from qrag_jax.runtime.saved_config import save_config
from qrag_jax.systems import q_rag_config
from qrag_jax.systems.q_rag_config import IMITATE, PQN, QRagConfig
from qrag_jax.systems.q_rag_inputs import Inputs, load_inputs


def check(config: ConfigDict) -> None:
    """Refuses values that are wrong for any data, and settles the name of the reward."""
    config.reward.name = QRagConfig.of(config).reward.name


before_devices = QRagConfig.before_devices


@contextlib.contextmanager
def open_system(
    given: ConfigDict,
    run: Run,
    *,
    dry: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[QRag]:
    """Opens the system, and the server of its language model if it has one; see `systems`."""
    QRagConfig.resume(given, run)
    config = QRagConfig.of(given)
    with contextlib.ExitStack() as stack:
        mesh = make_mesh(config.runtime.mesh, devices)
        for stage in config.stages:
            config.host_batch(stage, mesh.size, jax.process_count())
        config.eval.check_devices(mesh.size)
        service = None
        if isinstance(config.reward, ModelReward) and config.llm is not None and not dry:
            # The server starts while the data and the encoder are read.
            asked = open_service(
                config.reward,
                config.llm,
                Place(run.workdir, config.data.cache_folder, jax.process_index()),
                log,
                never_terminate=config.env.never_terminate,
                seed=config.seed,
            )
            service = stack.enter_context(asked)
        elif isinstance(config.reward, OwnReward):
            never = config.env.never_terminate
            own = open_own(config.reward, never_terminate=never, log=log)
            service = stack.enter_context(own)
        inputs = load_inputs(config, run, service, Platform.of(mesh))
        given.env.max_steps = inputs.max_steps
        config = QRagConfig.of(given)

        def write() -> None:
            noise.write_books(run.workdir, config.data.backgrounds)
            save_config(q_rag_config.settled(given, inputs.encoder.encoder), run.config_path)

        run.begin(write)
        yield QRag(config, mesh, inputs, service, placed=devices is None)


@dataclasses.dataclass
class QRag:
    """See `systems.System`."""

    config: QRagConfig
    mesh: Mesh
    inputs: Inputs
    service: PendingService | None
    placed: bool = True  # else the mesh's devices are described, and only shapes are made
    _rewards: Rewards | None = None
    _step: int | None = None  # of the next update

    def __post_init__(self) -> None:
        self.train, self.profile = self.config.train, self.config.profile
        stores = {**self.inputs.stores, DEV: self.inputs.dev_store}
        self.data = {name: store.content_key for name, store in stores.items()}
        self.provenance = self.service.provenance if self.service else {}
        self.line, self.told = (
            self.inputs.line(self.config, self.mesh),
            self.inputs.told(self.config),
        )

    def first_state(self) -> TrainState:
        loaded = self.inputs.encoder
        return self.towers.first_state(loaded.trained, self.config.seed, loaded.second)

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        config, inputs = self.config, self.inputs
        shares = config.data.shares(inputs.stores)
        if len(shares) > 1:
            log("mixture: " + ", ".join(f"{share:.1%} {name}" for name, share in shares.items()))
        if self.service is not None:
            self._rewards = self.service.ready(stop)

        def batches(stage: str, goes_on: bool) -> Batches:
            iterator = training_batches(
                inputs.stores,
                shares,
                inputs.shape,
                batch_size=config.host_batch(stage, self.mesh.size, jax.process_count()),
                seed=config.seed,
                workers=config.data.workers,
                shard=(jax.process_index(), jax.process_count()),
                ordered=config.data.ordered,
            )
            if goes_on and run.progress.batches is not None:
                iterator.set_state(run.progress.batches)
            return Batches(self.mesh, iterator)

        def by_rewards(goes_on: bool) -> Experience:
            pending = run.progress.pending if goes_on else ()
            if self._rewards is None:
                return Fused(batches(PQN, goes_on))
            assert isinstance(config.reward, DeferredReward)
            staleness, samples = config.reward.staleness, inputs.train_samples
            asking = Asking(self._rewards, samples, staleness, config.train.steps)
            play = self.towers.bound(make_play_step(self.towers))
            return Deferred(self.mesh, play, batches(PQN, goes_on), asking, pending)

        def by_facts(goes_on: bool) -> Experience:
            return Fused(batches(IMITATE, goes_on))

        kinds = {IMITATE: (0, by_facts), PQN: (config.imitated, by_rewards)}
        return Staged([kinds[stage] for stage in config.stages], run.step)

    def update(self, state: TrainState, episodes: Any) -> tuple[TrainState, dict[str, Any]]:
        if self._step is None:
            self._step = int(jax.device_get(state.step))
        program = self._imitation if self._step < self.config.imitated else self._update
        if self._step == self.config.imitated > 0:
            state = self.towers.next_stage(state)
        self._step += 1
        arguments = (state, episodes, *self._base)
        with jax.transfer_guard("disallow"):
            self._first_calls.before("update", program, arguments)
            state, metrics = program(*arguments)
        if not self.inputs.has_facts:  # no score of facts that nobody knows
            metrics = {name: value for name, value in metrics.items() if name != "fact_em"}
        return state, metrics

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        params = self.towers.with_base(state.params)
        return self._scores.evaluate(params, step, self._rewards, stop)

    def programs(self) -> list[Program]:
        towers, inputs, config = self.towers, self.inputs, self.config
        state = towers.parts.shapes(inputs.encoder.trained)
        batch = inputs.batch_shapes(config.train.batch_size)
        scored = inputs.batch_shapes(config.eval.batch_size)
        base = self._base
        at_a_time = config.train.batch_size // config.train.accumulation
        loops = partial(self._loops, at_a_time)
        evaluation = Program(
            "evaluation",
            self._play,
            (towers.with_base(state.params), scored),
            partial(self._loops, config.eval.batch_size),
        )
        programs = []
        if config.imitate:
            shown = inputs.batch_shapes(config.imitate.batch_size)
            programs.append(Program("imitation", self._imitation, (state, shown, *base)))
        if PQN not in config.stages:
            return [*programs, evaluation]
        if config.is_on_device:
            update = Program("update", self._update, (state, batch, *base), loops)
            return [*programs, update, evaluation]
        number = jax.ShapeDtypeStruct((), "int32")
        played = scored_shapes(batch, config.env.max_steps)
        play = Program("play", make_play_step(towers), (state, batch, number, *base), loops)
        learn = Program("update", self._update, (state, played, *base), loops)
        return [*programs, play, learn, evaluation]

    def _loops(self, questions: int) -> Loops:
        """The course of the loops of a program that computes so many questions at a time."""
        actor, inputs, stores = self.towers.actor, self.inputs, [*self.inputs.stores.values()]
        # Devices along `tensor` compute all their rows together (`models.compute.group`).
        together = questions * actor.encoder.module.group.tensor // self.mesh.size
        return loop_rounds(actor, inputs.shape, stores, together)

    @cached_property
    def towers(self) -> TwoTowers:
        """The two towers, from which all programs are built."""
        config, inputs, loaded = self.config, self.inputs, self.inputs.encoder
        stores, encoder = [*inputs.stores.values()], loaded.encoder
        shapes = choose_block_shapes(
            config.encoder,
            config.rollout,
            encoder,
            inputs.shape,
            stores,
            platform=Platform.of(self.mesh),
        )
        return TwoTowers.of(
            self.mesh,
            Actor(encoder, shapes, config.rollout),
            loaded,
            config.runtime.rules(loaded.partition_rules),
            config=config.pqn,
            optimizer=config.optimizer,
            accumulation=config.train.accumulation,
            placed=self.placed,
            first=config.imitated,
        )

    @cached_property
    def _update(self) -> Any:
        """The program of an update: it plays, scores and learns, or learns from scored episodes."""
        if self.config.is_on_device:
            return make_train_step(self.towers, self._feedback)
        return make_learn_step(self.towers)

    @cached_property
    def _imitation(self) -> Any:
        """The program of an update of the first stage."""
        config, towers = self.config, self.towers.imitating(self.config.imitating)
        assert config.imitate is not None
        learn = ImitationGradient(towers.actor, config.imitate, config.pqn, self._feedback)
        return make_step(towers, learn)

    @cached_property
    def _first_calls(self) -> FirstCalls:
        return FirstCalls(self.mesh.local_devices, "q_rag", log)

    @property
    def _base(self) -> tuple[Any, ...]:
        return () if self.towers.base is None else (self.towers.base,)

    @property
    def _feedback(self) -> Any:
        reward, stops = self.config.reward, self.config.env.stop_action
        weak = reward.name == ANSWER_IN_CHUNK and not OF_VALUES & {*self.config.data.sources}
        needed = NEEDED if weak else None
        return fact_feedback(reward, stop_action=stops, needed=needed)

    @cached_property
    def _play(self) -> Any:
        return make_play(Player.of(self.towers, self._feedback), self.towers.actor.block_shapes)

    @cached_property
    def _scores(self) -> TrainingScores:
        config, i = self.config, self.inputs
        size = config.eval.batch_size
        shown = i.dev_samples, i.dev_store, i.shape, size, i.dev_indices
        by_facts = config.reward.name != ANSWER_IN_CHUNK
        episodes = EpisodeEvaluator(self._play, self.mesh, *shown, by_facts=by_facts)
        gamma, env = config.pqn.gamma, config.env
        return TrainingScores(episodes, config.eval.best_by, gamma, env.max_steps, env.stop_action)

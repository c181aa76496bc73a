"""Q-RAG (arXiv 2511.07328): PQN trains two towers to take chunks of a document one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.data import long_docs, tokens
from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, empty_episode, training_batches
from qrag_jax.data.loading import LoadedSamples, load_splits, truncation_report
from qrag_jax.data.sample import OF_VALUES, LazySamples, Sample
from qrag_jax.environments.chunks import ChunksConfig
from qrag_jax.errors import InputError
from qrag_jax.evaluators.episodes import EpisodeEvaluator, TrainingScores, make_play
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.feedback import facts
from qrag_jax.feedback.rewards import METRICS, OWN, Rewards, open_own
from qrag_jax.learners import optimizers, two_towers
from qrag_jax.learners.state import Parts, TrainState
from qrag_jax.learners.two_towers import ImitationGradient, PQNGradient
from qrag_jax.models import first_encoder, pretrained
from qrag_jax.models.compute.lora import merge
from qrag_jax.rollouts.chunks import Actor, check_fit
from qrag_jax.rollouts.experience import Batches, Deferred, Experience, ScoredEpisodes, Staged
from qrag_jax.rollouts.text_table import choose_block_shapes, mean_rows
from qrag_jax.runtime import aot, config_fields, interrupt
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import DEV, Run, log
from qrag_jax.systems.config import chosen_places
from qrag_jax.systems.q_rag.config import IMITATE, PQN, UNTIL_FOUND, QRagConfig, settled
from qrag_jax.systems.training import MeshSystem, Opening

if TYPE_CHECKING:
    from qrag_jax.systems.q_rag.run import SavedRun
    from qrag_jax.systems.scoring import Predictor


@dataclasses.dataclass(kw_only=True)
class QRag(MeshSystem[QRagConfig]):
    SETTINGS, OF_QUESTIONS = QRagConfig, ("data.", "eval.path")
    service: Rewards | None  # None: arrays give the rewards

    def __post_init__(self) -> None:
        super().__post_init__()
        config, train, inputs = self.config, self.train, self.inputs
        env = dataclasses.replace(config.env, max_steps=inputs.max_steps)
        self.config = config = dataclasses.replace(config, env=env)
        stores = {**inputs.stores, DEV: inputs.dev_store}
        self.data = {name: store.content_key for name, store in stores.items()}
        if self.service is not None:
            self.provenance = self.service.provenance
        stages = [f"{train.steps - config.imitated} steps of {train.batch_size} questions"]
        if config.imitate:
            imitation = f"{config.imitated} steps of imitation with {config.imitate.batch_size}"
            stages = [imitation, *stages] if train.steps > config.imitated else [imitation]
        self.line = (
            f"{sum(map(len, inputs.stores.values()))} training questions, "
            f"{len(inputs.dev_indices)} scored every {train.eval_every} steps; "
            f"{', then '.join(stages)} on {self.mesh.size} {Platform.of(self.mesh).kind} device(s)"
        )
        self.shown = {"loss": ".3f", "fact_em" if inputs.has_facts else "return": ".2f"}

    # ---------------------------------------------------------------- how it is opened

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        config.reward.name = QRagConfig.of(config).reward.name

    @classmethod
    def check_mesh(cls, config: QRagConfig, mesh: Mesh, local_mesh: Mesh) -> None:
        for stage in config.stages:
            config.host_batch(stage, mesh.size, jax.process_count())
        config_fields.check_split("eval.batch_size", config.eval.batch_size, mesh.size)

    @classmethod
    def parts(cls, at: Opening) -> dict[str, Any]:
        config, service = at.config, None
        how: Any = {"never_terminate": config.env.never_terminate, "log": log}
        if config.reward.name in METRICS and config.llm is not None and not at.dry:
            from qrag_jax.feedback.llm import open_service  # most runs ask no language model

            # The server starts while the data and the encoder are read.
            how |= {"seed": config.seed, "host": jax.process_index()}
            opened = open_service(config.reward, config.llm, at.workdir, **how)
            service = at.stack.enter_context(opened)
        elif config.reward.name == OWN:
            service = at.stack.enter_context(open_own(config.reward, **how))
        inputs = load_inputs(config, at.workdir, service, Platform.of(at.mesh), begun=at.begun)
        return {"inputs": inputs, "service": service}

    @classmethod
    def write(cls, raw: ConfigDict, run: Run, inputs: Inputs) -> None:
        raw.env.max_steps = inputs.max_steps
        long_docs.write_books(run.workdir, QRagConfig.of(raw).data.backgrounds)
        config_fields.save_config(settled(raw, inputs.model.encoder), run.config_path)

    # ---------------------------------------------------------------- its trained runs
    # What plays and exports them is imported here: no training needs it.

    @classmethod
    def saved(cls, *of_run: Any) -> SavedRun:
        from qrag_jax.systems.q_rag.run import SavedRun

        return SavedRun.open(*of_run)

    @classmethod
    def open_predictor(cls, *how: Any) -> AbstractContextManager[Predictor]:
        from qrag_jax.systems.q_rag import scoring

        return scoring.open_predictor(*how)

    @classmethod
    def score_lengths(cls, workdir: Path, config: ConfigDict, *how: Any, **options: Any) -> None:
        """Documents of several lengths: `qrag evaluate --chunks`."""
        from qrag_jax.systems.q_rag import scoring

        scoring.score_lengths(cls.saved(workdir, config), *how, **options)

    @classmethod
    def export_run(cls, workdir: Path, config: ConfigDict, checkpoint: str, out: Path) -> None:
        saved = cls.saved(workdir, config)
        saved.export(saved.chosen(checkpoint), out)

    # ---------------------------------------------------------------- what is learned from

    def names(self, numbers: Sequence[int], step: int) -> list[str]:
        return [self.inputs.train_samples[number].id for number in numbers]

    def experience(self, run: Run, stop: interrupt.StopSignal) -> Experience:
        config, inputs = self.config, self.inputs
        shares = config.data.shares(inputs.stores)
        if len(shares) > 1:
            log("mixture: " + ", ".join(f"{share:.1%} {name}" for name, share in shares.items()))
        if self.service is not None:
            self.service.ready(stop)
        seen = config.imitated * config.imitate.batch_size if config.imitate else 0

        def batches(stage: str, goes_on: bool) -> Batches:
            shard = jax.process_index(), jax.process_count()
            iterator = training_batches(
                inputs.stores,
                shares,
                inputs.shape,
                batch_size=config.host_batch(stage, self.mesh.size, shard[1]),
                seed=config.seed,
                workers=config.data.workers,
                shard=shard,
                ordered=config.data.ordered,
                skipped=seen if stage == PQN else 0,
            )
            if goes_on and run.progress.batches is not None:
                iterator.set_state(run.progress.batches)
            return Batches(self.mesh, iterator)

        def by_rewards(goes_on: bool) -> Experience:
            pending = run.progress.pending if goes_on else ()
            if self.service is None:
                return batches(PQN, goes_on)
            program, base = two_towers.make_play_step(self.learner), self.base
            return Deferred(
                self.mesh,
                lambda *arguments: program(*arguments, *base),
                batches(PQN, goes_on),
                self.service,
                inputs.train_samples,
                staleness=config.reward.staleness,
                steps=config.train.steps,
                pending=pending,
            )

        by_facts = (0, lambda goes_on: batches(IMITATE, goes_on))
        kinds = {IMITATE: by_facts, PQN: (config.imitated, by_rewards)}
        return Staged([kinds[stage] for stage in config.stages], run.step)

    def update(self, state: TrainState, episodes: Any) -> tuple[TrainState, dict[str, Any]]:
        step = self._updates(state)
        program = self._imitation if step < self.config.imitated else self._update
        if step == self.config.imitated > 0:
            state = self.learner.next_stage(state)
        self._step = step + 1
        state, metrics = self._call("update", program, (state, episodes, *self.base))
        if not self.inputs.has_facts:  # no score of facts that nobody knows
            metrics = {name: value for name, value in metrics.items() if name != "fact_em"}
        return state, metrics

    def evaluate(self, state: TrainState, step: int, stop: interrupt.StopSignal) -> Evaluation:
        params = self._whole(state.params)
        return self._scores.evaluate(params, step, self.service, stop)

    def programs(self) -> list[aot.Program]:
        towers, inputs, config, base = self.learner, self.inputs, self.config, self.base
        state, size = towers.parts.shapes(inputs.model.trained), config.eval.batch_size
        batch, trunk = inputs.batch_shapes(config.train.batch_size), inputs.model.trunk
        number, chunk, text = mean_rows(towers.actor, inputs.shape, [*inputs.stores.values()])
        steps, flops = config.env.max_steps, trunk.config.flops
        # Of a question: of all its chunks, and of the states and the chosen chunks of an episode.
        chunks, states, chosen = flops(number, chunk), flops(steps, text), flops(steps, chunk)
        play, gradient = chunks + states, towers.gradient_passes
        imitated = (1 + gradient) * (chunks + 2 * states)  # in two orders of the facts
        programs = []

        def add(name: str, function: Any, arguments: tuple[Any, ...], count: int, cost: float):
            dtype = trunk.precision.products.name
            programs.append(aot.Program(name, function, arguments, count * cost, dtype))

        if config.imitate:
            shown = inputs.batch_shapes(count := config.imitate.batch_size)
            add("imitation", self._imitation, (state, shown, *base), count, imitated)
        if PQN in config.stages:
            count, learned = config.train.batch_size, gradient * (states + chosen)
            learned += imitated if config.imitate and config.imitate.pqn_weight else 0
            episodes: Any = batch
            if config.is_on_device:
                learned += play * (1 if config.pqn.tau == 1 else 2)  # targets
            else:
                learned += play + chosen
                arguments = state, batch, jax.ShapeDtypeStruct((), "int32"), *base
                function = two_towers.make_play_step(towers)
                add("play", function, arguments, count, play)
                played = jax.eval_shape(function, *arguments)
                episodes = ScoredEpisodes(batch, played, played.entropy, played.valid)
            add("update", self._update, (state, episodes, *base), count, learned)
        scored = self._whole(state.params), inputs.batch_shapes(size)
        add("evaluation", self._play, scored, size, play)
        return programs

    @cached_property
    def learner(self) -> two_towers.TwoTowers:
        config, inputs, loaded = self.config, self.inputs, self.inputs.model
        stores, encoder = [*inputs.stores.values()], loaded.encoder
        shapes = choose_block_shapes(
            config.encoder,
            config.rollout,
            encoder,
            inputs.shape,
            stores,
            platform=Platform.of(self.mesh),
        )
        schedule = optimizers.learning_rate_schedule(config.optimizer)
        return two_towers.TwoTowers.of(
            self.mesh,
            loaded,
            Parts(optimizers.make_optimizer(config.optimizer), has_targets=True),
            actor=Actor(encoder, shapes, config.rollout),
            config=config.pqn,
            schedule=lambda step: schedule(step - config.imitated),
            peak=config.optimizer.learning_rate,
            accumulation=config.train.accumulation,
        )

    @cached_property
    def _update(self) -> Any:
        """The program of an update: it plays, scores and learns, or learns from scored episodes."""
        actor, config = self.learner.actor, self.config.pqn
        feedback = self._feedback if self.config.is_on_device else None
        imitate, labels = self.config.imitate, None
        if imitate and imitate.pqn_weight:
            imitate = dataclasses.replace(imitate, distractors=0, shared_by=1)
            labels = ImitationGradient(actor, imitate, config.alpha)
        return two_towers.make_update(self.learner, PQNGradient(actor, config, feedback, labels))

    @cached_property
    def _imitation(self) -> Any:
        config, towers = self.config, self.learner.imitating(self.config.imitating)
        assert config.imitate is not None
        learn = ImitationGradient(towers.actor, config.imitate, config.pqn.alpha)
        return two_towers.make_update(towers, learn)

    def _whole(self, params: Any) -> Any:
        """The parameters to play with: adapters together with their base, or whole towers."""
        return merge(params, self.base[0] if self.base else None)

    @property
    def _feedback(self) -> Any:
        reward, stops = self.config.reward, self.config.env.stop_action
        weak = reward.name == facts.ANSWER_IN_CHUNK and not OF_VALUES & {*self.config.data.sources}
        needed = facts.NEEDED if weak else None
        return facts.fact_feedback(reward, stop_action=stops, needed=needed)

    @cached_property
    def _play(self) -> Any:
        towers, how = self.learner, (self._feedback, self.config.pqn.gamma)
        return make_play(towers.mesh, towers.params_shardings, towers.actor, *how)

    @cached_property
    def _scores(self) -> TrainingScores:
        config, i = self.config, self.inputs
        size = config.eval.batch_size
        shown = i.dev_samples, i.dev_store, i.shape, size, i.dev_indices
        by_facts = config.reward.name != facts.ANSWER_IN_CHUNK
        episodes = EpisodeEvaluator(self._play, self.mesh, *shown, by_facts=by_facts)
        before = config.env.max_steps if config.env.stop_action else 0
        return TrainingScores(episodes, config.eval.best_by, config.pqn.gamma, before)


# ---------------------------------------------------------------- what a run reads


@dataclasses.dataclass(frozen=True)
class Inputs:
    model: pretrained.LoadedEncoder
    stores: dict[str, tokens.TokenStore]  # training tokens by source
    dev_samples: Sequence[Sample]
    dev_store: tokens.TokenStore
    train_samples: Sequence[Sample]  # of all sources, one after the other
    dev_indices: list[int]  # the fixed questions scored during training
    shape: EpisodeShape
    max_steps: int  # T, as the config has it or as the training questions need
    has_facts: bool = True  # what training counts as found are supporting facts

    def batch_shapes(self, questions: int) -> EpisodeBatch:
        one = jax.tree.map(np.asarray, empty_episode(self.shape))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((questions, *leaf.shape), leaf.dtype), one
        )


def load_inputs(
    config: QRagConfig, workdir: Path, service: Rewards | None, platform: Platform, *, begun: bool
) -> Inputs:
    """Reads and tokenises the data, prepares the encoder, and checks that they fit together."""
    if not begun:
        first_encoder.check_origin(config.encoder)
    read, dev = load_splits(config.data, config.dev_data, hold_out=not config.eval.path)
    if config.data.negatives.index:
        # Searching a corpus is an option, which most trainings do without.
        from qrag_jax.systems.search import with_negatives

        read = with_negatives(config.data.negatives, read, workdir, config.data.passage_separator)
    train, played, scored, has_facts = with_labels(config, read, dev)
    for line in [*train.report, *dev.report]:
        log(line)
    steps = _max_steps(config.env.max_steps, {"training": read, "evaluation": dev})
    config = dataclasses.replace(config, env=dataclasses.replace(config.env, max_steps=steps))
    if service is not None:
        for samples in (*train.by_source.values(), *dev.by_source.values()):
            service.check(samples)
    texts = (text for s in train.all for text in (s.question, *s.chunks))
    of_run: Any = {"is_kept": begun, "platform": platform}
    encoder = first_encoder.prepare_encoder(config.encoder, workdir, texts, config.seed, **of_run)
    if encoder.second is not None and encoder.adapters is not None:
        raise InputError(
            f"config.encoder.path is {config.encoder.path}, an export of two towers, and adapters "
            "need one base; set config.encoder.lora.rank to 0, or give its folder state or chunk."
        )
    stores = {
        name: config.data.tokenised(samples, encoder.tokenizer)
        for name, samples in train.by_source.items()
    }
    for name, store in stores.items():
        if report := truncation_report(store, config.data, encoder.tokenizer):
            log(f"{name}: {report}")
    dev_store = config.data.tokenised(played, encoder.tokenizer)
    shape = EpisodeShape.holding([*stores.values(), dev_store])
    check_fit(config.rollout, encoder.encoder, shape, stores)
    indices = chosen_places(scored, config.eval.samples, config.eval.seed)
    return Inputs(
        encoder, stores, dev.all, dev_store, train.all, indices, shape, steps, has_facts=has_facts
    )


def _max_steps(max_steps: int, splits: Mapping[str, LoadedSamples]) -> int:
    """T, which a config may leave open (0), and how many questions it is too small for.

    Sources that make their documents are not counted: their configs give T.
    """
    needed = {split: [len(sample.support) for sample in _read(s)] for split, s in splits.items()}
    most = max(needed["training"], default=0)
    steps = max_steps or most or ChunksConfig.max_steps
    if not max_steps:
        why = "the most supporting facts of a training question"
        unknown = "no training question names its supporting facts; give what yours need"
        log(f"config.env.max_steps={steps}: {why if most else unknown}")
    for split, counts in needed.items():
        if beyond := sum(count > steps for count in counts):
            log(
                f"warning: {beyond} of {len(counts)} {split} questions have more supporting facts "
                f"(up to {max(counts)}) than config.env.max_steps={steps}, so they are never solved"
            )
    return steps


def with_labels(
    config: QRagConfig, train: LoadedSamples, dev: LoadedSamples
) -> tuple[LoadedSamples, Sequence[Sample], Sequence[int], bool]:
    """Gives the samples what the reward reads, and refuses those that lack it.

    Returns:
        What is trained on; the evaluation questions as they are played, and the numbers of those
        that training may score; whether what is found are supporting facts, of every question.
    """
    if config.imitated:
        _check_facts(train, "config.stages has imitate", "set config.stages to pqn")
    if config.eval.best_by == UNTIL_FOUND:
        _check_facts(dev, f"config.eval.best_by is {UNTIL_FOUND}", "use return")
    if config.reward.name == facts.ANSWER_IN_CHUNK:
        return *facts.labelled_splits(train, dev), False
    if config.reward.name == facts.GROUND_TRUTH:
        for loaded in (train, dev):
            other = f"use config.reward.name={facts.ANSWER_IN_CHUNK} or a language model's reward"
            _check_facts(loaded, f"config.reward.name is {facts.GROUND_TRUTH}", other)
    has_facts = all(sample.support for sample in _read(train))
    return train, dev.all, range(len(dev.all)), has_facts


def _check_facts(loaded: LoadedSamples, field: str, other: str) -> None:
    if without := [sample for sample in _read(loaded) if not sample.support]:
        raise InputError(
            f"{field}, which needs supporting facts, and {len(without)} questions, such as "
            f"{without[0].id} of {without[0].source}, have no 'support'; give it, or {other}."
        )


def _read(loaded: LoadedSamples) -> Iterator[Sample]:
    """All samples but those of sources that make their documents, which have facts."""
    for samples in loaded.by_source.values():
        yield from () if isinstance(samples, LazySamples) else samples


SYSTEM = QRag

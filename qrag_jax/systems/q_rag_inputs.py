"""Reads and checks the data and the encoder of a Q-RAG run, before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, empty_episode
from qrag_jax.data.loading import (
    LoadedSamples,
    load_splits,
    tokenise_samples,
    truncation_report,
)
from qrag_jax.data.sample import OF_VALUES, LazySamples, Sample
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments.chunks import ChunksConfig
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import UNTIL_FOUND
from qrag_jax.feedback.facts import ANSWER_IN_CHUNK, GROUND_TRUTH, labelled
from qrag_jax.feedback.llm import PendingService
from qrag_jax.models.first_encoder import check_origin, prepare_encoder
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.rollouts.chunks import check_fit
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems.q_rag_config import QRagConfig


@dataclasses.dataclass(frozen=True)
class Labelled:
    """The samples of a run, with what its reward reads."""

    train: LoadedSamples  # what is trained on
    # The evaluation questions as they are played; the chunks are those of the loaded ones
    dev: Sequence[Sample]
    scored: Sequence[int]  # numbers of the evaluation questions that training may score
    has_facts: bool  # whether what training counts as found are supporting facts, of every question


def with_labels(config: QRagConfig, train: LoadedSamples, dev: LoadedSamples) -> Labelled:
    """Gives the samples what the reward reads, and refuses those that lack it."""
    if config.eval.best_by == UNTIL_FOUND and any(_without_facts(dev).values()):
        raise InputError(
            f"config.eval.best_by is {UNTIL_FOUND}, but not all evaluation questions have "
            "supporting facts; use return."
        )
    if config.reward.name == ANSWER_IN_CHUNK:
        return _by_answers(train, dev)
    if config.reward.name == GROUND_TRUTH:
        for name, ids in (*_without_facts(train).items(), *_without_facts(dev).items()):
            if ids:
                raise InputError(
                    f"config.reward.name is {GROUND_TRUTH}, but the {name} question {ids[0]} has "
                    "no supporting facts (field 'support'); give them, or use config.reward.name="
                    f"{ANSWER_IN_CHUNK} or a language model's reward."
                )
    has_facts = not any(_without_facts(train).values())
    return Labelled(train, dev.all, range(len(dev.all)), has_facts)


def _by_answers(train: LoadedSamples, dev: LoadedSamples) -> Labelled:
    sources = {**train.by_source, **dev.by_source}
    reward = f"config.reward.name is {ANSWER_IN_CHUNK}"
    for name, samples in (*train.by_source.items(), *dev.by_source.items()):
        if isinstance(samples, LazySamples):
            raise InputError(
                f"{reward}, but {name} makes its documents as they are played, and knows their "
                f"supporting facts; use {GROUND_TRUTH}."
            )
    if len({name in OF_VALUES for name in sources}) > 1:
        raise InputError(
            f"{reward}, which needs one chunk of most data and all values of "
            f"{', '.join(OF_VALUES)}, and config.data.sources has both; name one."
        )
    report = list(train.report)

    def marked(samples: Sequence[Sample], whose: str, left_out: str) -> list[Sample]:
        """All samples; those that cannot be rewarded have no supporting chunk."""
        found, without = labelled(samples)
        reasons = ", ".join(f"{count} {reason}" for reason, count in without.items())
        if not any(sample.support for sample in found):
            raise InputError(
                f"{reward}, but no {whose} question can be rewarded by it ({reasons}); give data "
                "with answers (field 'answers' of your own data) in config.data.path and "
                "config.eval.path, or another reward."
            )
        if reasons:
            report.append(f"{left_out}: {reasons}".format(sum(without.values())))
        return found

    kept: dict[str, Sequence[Sample]] = {}
    for name, samples in train.by_source.items():
        found = marked(samples, f"{name} training", f"{name}: {{}} training questions left out")
        kept[name] = [sample for sample in found if sample.support]
    played = marked(dev.all, "evaluation", "evaluation: {} questions not scored in training")
    scored = [number for number, sample in enumerate(played) if sample.support]
    return Labelled(LoadedSamples(kept, report), played, scored, has_facts=False)


def _without_facts(loaded: LoadedSamples) -> dict[str, list[str]]:
    """The ids of each source's questions without supporting facts; made documents have them."""
    return {
        name: []
        if isinstance(samples, LazySamples)
        else [sample.id for sample in samples if not sample.support]
        for name, samples in loaded.by_source.items()
    }


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a run reads."""

    encoder: LoadedEncoder
    stores: dict[str, TokenStore]  # training tokens by source
    dev_samples: Sequence[Sample]
    dev_store: TokenStore
    train_samples: Sequence[Sample]  # of all sources, one after the other
    dev_indices: list[int]  # the fixed questions scored during training
    shape: EpisodeShape
    max_steps: int  # T, as the config has it or as the training questions need
    has_facts: bool = True  # what training counts as found are supporting facts

    def line(self, config: QRagConfig, mesh: Mesh) -> str:
        """One line for the screen: numbers of questions, steps and devices."""
        questions, train = sum(map(len, self.stores.values())), config.train
        stages = [f"{train.steps - config.imitated} steps of {train.batch_size} questions"]
        if config.imitate:
            imitation = f"{config.imitated} steps of imitation with {config.imitate.batch_size}"
            stages = [imitation, *stages] if train.steps > config.imitated else [imitation]
        return (
            f"{questions} training questions, {len(self.dev_indices)} scored every "
            f"{train.eval_every} steps; {', then '.join(stages)} on "
            f"{mesh.size} {Platform.of(mesh).kind} device(s)"
        )

    def told(self, config: QRagConfig) -> Told:
        """What the log of steps shows: names of questions, metrics and advice."""
        dtype, rate = config.encoder.dtype, config.optimizer.learning_rate
        advice = f"a lower --config.optimizer.learning_rate (it is {rate:g}), "
        if dtype != "float32":
            advice += f"with --config.encoder.dtype=float32 (it is {dtype}), "

        def names(numbers: Sequence[int]) -> list[str]:
            return [self.train_samples[number].id for number in numbers]

        found = {"fact_em": ".2f"} if self.has_facts else {"return": ".2f"}
        return Told(names, {"loss": ".3f", **found}, advice + "or ")

    def batch_shapes(self, questions: int) -> EpisodeBatch:
        """Shapes and dtypes of a batch of this many questions."""
        one = jax.tree.map(np.asarray, empty_episode(self.shape))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((questions, *leaf.shape), leaf.dtype), one
        )


def load_inputs(
    config: QRagConfig, run: Run, service: PendingService | None, platform: Platform
) -> Inputs:
    """Reads and tokenises the data, prepares the encoder, and checks that they fit together."""
    if not run.has_begun:
        check_origin(config.encoder)
    train_samples, dev = load_splits(config.data, config.dev_data, hold_out=not config.eval.path)
    if config.data.negatives.index:
        # Searching a corpus is an option, which most trainings do without.
        from qrag_jax.systems.mined_negatives import with_negatives

        train_samples = with_negatives(
            config.data.negatives, train_samples, run, config.data.passage_separator
        )
    labels = with_labels(config, train_samples, dev)
    read, train_samples = train_samples, labels.train
    for name, ids in _without_facts(read).items() if config.imitated else ():
        if ids:  # imitation learns nothing from them
            raise InputError(
                f"config.stages has imitate, which learns from supporting facts, and {len(ids)} of "
                f"{len(read.by_source[name])} training questions of {name} name none; set "
                "config.stages to pqn, or leave these questions out."
            )
    for line in [*train_samples.report, *dev.report]:
        log(line)
    steps = _max_steps(config.env.max_steps, {"training": read, "evaluation": dev})
    config = dataclasses.replace(config, env=dataclasses.replace(config.env, max_steps=steps))
    if service is not None:
        for samples in (*train_samples.by_source.values(), *dev.by_source.values()):
            service.check(samples)
    texts = (text for s in train_samples.all for text in (s.question, *s.chunks))
    kept = run.has_begun
    encoder = prepare_encoder(
        config.encoder, run.workdir, texts, config.seed, is_kept=kept, platform=platform
    )
    if encoder.second is not None and encoder.adapters is not None:
        raise InputError(
            f"config.encoder.path is {config.encoder.path}, an export of two towers, and adapters "
            "need one base; set config.encoder.lora.rank to 0, or give its folder state or chunk."
        )
    stores = {
        name: tokenise_samples(config.data, encoder.tokenizer, samples)
        for name, samples in train_samples.by_source.items()
    }
    for name, store in stores.items():
        if report := truncation_report(store, config.data, encoder.tokenizer):
            log(f"{name}: {report}")
    dev_store = tokenise_samples(config.data, encoder.tokenizer, labels.dev)
    shape = EpisodeShape.holding([*stores.values(), dev_store])
    check_fit(config.rollout, encoder.encoder, shape, stores)
    order = np.random.default_rng(config.eval.seed).permutation(len(labels.scored))
    taken = order[: config.eval.samples or len(labels.scored)].tolist()
    return Inputs(
        encoder=encoder,
        stores=stores,
        dev_samples=dev.all,
        dev_store=dev_store,
        train_samples=train_samples.all,
        dev_indices=sorted(labels.scored[place] for place in taken),
        shape=shape,
        max_steps=steps,
        has_facts=labels.has_facts,
    )


def _max_steps(given: int, splits: Mapping[str, LoadedSamples]) -> int:
    """T, which a config may leave open (0), and how many questions it is too small for.

    Sources that make their documents are not counted: their configs give T.
    """
    facts = {
        split: [
            len(sample.support)
            for samples in loaded.by_source.values()
            if not isinstance(samples, LazySamples)
            for sample in samples
        ]
        for split, loaded in splits.items()
    }
    most = max(facts["training"], default=0)
    steps = given or most or ChunksConfig.max_steps
    if not given:
        why = "the most supporting facts of a training question"
        unknown = "no training question names its supporting facts; give what yours need"
        log(f"config.env.max_steps={steps}: {why if most else unknown}")
    for split, counts in facts.items():
        if beyond := sum(count > steps for count in counts):
            log(
                f"warning: {beyond} of {len(counts)} {split} questions have more supporting facts "
                f"(up to {max(counts)}) than config.env.max_steps={steps}, so they are never solved"
            )
    return steps

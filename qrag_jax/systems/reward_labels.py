"""What a run's reward reads from its samples: supporting facts, or where the answer stands.

Programs on the device know of a question one set of chunks, its `support`. With the reward
`answer_in_chunk` these are the chunks in which the answer stands; scores of supporting facts are
still taken from the facts, where somebody knows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.loading import LoadedSamples
from qrag_jax.data.sample import OF_VALUES, Sample
from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import UNTIL_FOUND
from qrag_jax.feedback.answer_labels import labelled
from qrag_jax.feedback.ground_truth import ANSWER_IN_CHUNK, GROUND_TRUTH
from qrag_jax.systems.q_rag_config import QRagConfig


@dataclasses.dataclass(frozen=True)
class Labelled:
    """The samples of a run, with what its reward reads.

    Attributes:
        train: what is trained on.
        dev: the evaluation questions as they are played; the chunks are those of the loaded ones.
        scored: numbers of the evaluation questions that training may score.
        has_facts: whether what training counts as found are supporting facts, of every question.
    """

    train: LoadedSamples
    dev: Sequence[Sample]
    scored: Sequence[int]
    has_facts: bool


def with_labels(config: QRagConfig, train: LoadedSamples, dev: LoadedSamples) -> Labelled:
    """Gives the samples what the reward reads, and refuses those that lack it."""
    own = [(name, each) for split in (train, dev) for name, each in split.by_source.items()]
    _check_best_by(config, dev)
    if config.reward.name == ANSWER_IN_CHUNK:
        for name, samples in own:
            if isinstance(samples, LazySamples):
                raise InputError(
                    f"config.reward.name is {ANSWER_IN_CHUNK}, but {name} makes its documents as "
                    f"they are played, and knows their supporting facts; use {GROUND_TRUTH}."
                )
        if len({name in OF_VALUES for name, _ in own}) > 1:
            raise InputError(
                f"config.reward.name is {ANSWER_IN_CHUNK}, which needs one chunk of most data and "
                f"all values of {', '.join(OF_VALUES)}, and config.data.sources has both; name one."
            )
        return _by_answers(train, dev)
    if config.reward.name == GROUND_TRUTH:
        for name, samples in own:
            _check_facts(name, samples)
    has_facts = all(map(_have_facts, train.by_source.values()))
    return Labelled(train, dev.all, range(len(dev.all)), has_facts)


def _by_answers(train: LoadedSamples, dev: LoadedSamples) -> Labelled:
    kept: dict[str, Sequence[Sample]] = {}
    report = list(train.report)
    for name, samples in train.by_source.items():
        made, without = labelled(samples)
        kept[name] = [sample for sample in made if sample.support]
        told = ", ".join(f"{count} {reason}" for reason, count in without.items())
        if not kept[name]:
            raise InputError(
                f"config.reward.name is {ANSWER_IN_CHUNK}, but no {name} training question can be "
                f"rewarded by it ({told}); give data with answers (field 'answers' of your own "
                "data), or another reward."
            )
        if told:
            report.append(f"{name}: {sum(without.values())} training questions left out: {told}")
    played, without = labelled(dev.all)
    scored = [number for number, sample in enumerate(played) if sample.support]
    told = ", ".join(f"{count} {reason}" for reason, count in without.items())
    if not scored:
        raise InputError(
            f"config.reward.name is {ANSWER_IN_CHUNK}, but no evaluation question can be rewarded "
            f"by it ({told}); give config.eval.path data with answers, or another reward."
        )
    if told:
        count = len(played) - len(scored)
        report.append(f"evaluation: {count} questions not scored in training: {told}")
    return Labelled(LoadedSamples(kept, report), played, scored, has_facts=False)


def _have_facts(samples: Sequence[Sample]) -> bool:
    return isinstance(samples, LazySamples) or all(sample.support for sample in samples)


def _check_facts(name: str, samples: Sequence[Sample]) -> None:
    for sample in samples if not isinstance(samples, LazySamples) else ():
        if not sample.support:
            raise InputError(
                f"config.reward.name is {GROUND_TRUTH}, but the {name} question {sample.id} has no "
                "supporting facts (field 'support'); give them, or use config.reward.name="
                f"{ANSWER_IN_CHUNK} or a language model's reward."
            )


def _check_best_by(config: QRagConfig, dev: LoadedSamples) -> None:
    if config.eval.best_by == UNTIL_FOUND and not all(map(_have_facts, dev.by_source.values())):
        raise InputError(
            f"config.eval.best_by is {UNTIL_FOUND}, but not all evaluation questions have "
            "supporting facts; use return."
        )

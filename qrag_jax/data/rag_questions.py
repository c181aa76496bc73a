"""Questions for an agent that searches a corpus: answers, gold passages, and how to take it apart.

They come from the sources of `data.sources`, whose samples bring some passages of their own. These
are what an agent may search where there is no larger corpus.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.data import decompositions
from qrag_jax.data.config import DataConfig
from qrag_jax.data.decompositions import Decomposition
from qrag_jax.data.loading import LoadedSamples, load_split, paths_of, without_questions
from qrag_jax.data.sample import Sample, Split
from qrag_jax.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class RagQuestion:
    """One question.

    Attributes:
        sample: its text, answers and own passages.
        decomposition: None: the agent needs none.
    """

    sample: Sample
    decomposition: Decomposition | None = None

    @property
    def gold(self) -> tuple[str, ...]:
        """Texts of the gold passages."""
        return tuple(self.sample.chunks[place] for place in self.sample.support)


@dataclasses.dataclass(frozen=True)
class RagQuestions:
    """The questions of a run.

    Attributes:
        train, dev: of both splits; no question is in both.
        report: lines on what was read.
    """

    train: Sequence[RagQuestion]
    dev: Sequence[RagQuestion]
    report: list[str]

    def passages(self) -> list[str]:
        """The different passages of all questions, in the order in which they come."""
        every = (text for each in (*self.train, *self.dev) for text in each.sample.chunks)
        return list(dict.fromkeys(every))


def load_questions(
    config: DataConfig, dev: DataConfig, *, taken_apart: bool, max_hops: int
) -> RagQuestions:
    """Reads the questions of both splits.

    Args:
        config: of the training data.
        dev: of the questions to evaluate on; the same object if a part of the data is held out.
        taken_apart: only questions with a decomposition of at most `max_hops` hops are kept.
    """
    for each in (config, dev) if taken_apart else ():
        _check_taken_apart(each)
    hold_out = dev is config
    held_out = load_split(dev, "dev", hold_out=hold_out)
    train = without_questions(load_split(config, "train", hold_out=hold_out), held_out.all)
    found: dict[Split, list[RagQuestion]] = {}
    report = [*train.report, *held_out.report]
    splits: tuple[tuple[Split, DataConfig, LoadedSamples], ...] = (
        ("train", config, train),
        ("dev", dev, held_out),
    )
    for split, own, loaded in splits:
        found[split] = []
        for source, samples in loaded.by_source.items():
            if not taken_apart:
                found[split] += map(RagQuestion, samples)
                continue
            path = paths_of(own)[source]
            apart, _ = decompositions.read(source, path, split, own.columns)
            kept = [
                RagQuestion(sample, apart[sample.id])
                for sample in samples
                if sample.id in apart and len(apart[sample.id].hops) <= max_hops
            ]
            if len(kept) < len(samples):
                report.append(
                    f"{source}: {len(samples) - len(kept)} {split} questions left out, which have "
                    f"no decomposition of at most {max_hops} hops"
                )
            found[split] += kept
        if not found[split]:
            raise InputError(
                f"no {split} question has a decomposition of at most {max_hops} hops, which the "
                "scripted agent needs; give other data, or raise config.agent.max_hops."
            )
    return RagQuestions(found["train"], found["dev"], report)


def _check_taken_apart(config: DataConfig) -> None:
    for source in config.sources:
        if not config.path or source not in decompositions.KNOWN:
            raise InputError(
                f"the data source '{source}' has no decompositions here, which the scripted agent "
                f"needs; use {', '.join(decompositions.KNOWN)}, with the files of their data sets "
                "in config.data.path."
            )

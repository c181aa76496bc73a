"""Loads the training or evaluation samples of a run from all of its sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from qrag_jax.data.config import DataConfig, mix_weights
from qrag_jax.data.long_docs import babilong_documents, niah_documents
from qrag_jax.data.reading import is_one_part, load_samples
from qrag_jax.data.sample import LazySamples, Sample, Split, is_held_out, joined
from qrag_jax.data.sources import BABILONG, NIAH, SOURCES
from qrag_jax.data.tokens import TextTokenizer, TokenStore, tokenise
from qrag_jax.errors import InputError


class LoadedSamples(NamedTuple):
    """Samples of one split by source, and for each source one line on what was read."""

    by_source: dict[str, Sequence[Sample]]
    report: list[str]

    @property
    def all(self) -> Sequence[Sample]:
        """The samples of all sources, one after the other."""
        return joined(list(self.by_source.values()))


def load_split(
    config: DataConfig, split: Split, *, hold_out: bool, apart: bool = False
) -> LoadedSamples:
    """Reads the samples of every source.

    Args:
        hold_out: whether to split a path that is a single file or split of the hub (it has no dev
            part): "dev" gets a tenth, chosen by a hash of the id, and "train" gets the rest.
            Without it, each split gets the whole file.
        apart: whether samples shall have decompositions; some may have none.
    """
    limit = config.limit if split == "train" else 0
    paths = _paths(config)
    loaded = LoadedSamples({}, [])
    for name in mix_weights(config.sources):
        path = paths[name]
        samples: Sequence[Sample]
        if name == BABILONG:
            settings = dataclasses.replace(config.babilong, stories=path)
            samples, _, line = babilong_documents(settings, split, count=limit)
        elif name == NIAH and not path:
            samples, _, line = niah_documents(config.niah, split, count=limit)
        else:
            samples, read = load_samples(name, path, split, limit, config.columns, apart=apart)
            line = read.summary()
            if hold_out and is_one_part(path):
                samples = [s for s in samples if is_held_out(s.id) == (split == "dev")]
                line += f"; {len(samples)} of them for {split}"
                if not samples:
                    raise InputError(
                        f"{path}: too few records to hold some out; give train and dev files, or "
                        "config.eval.path."
                    )
        loaded.by_source[name] = samples
        loaded.report.append(line)
    return loaded


def _paths(config: DataConfig) -> dict[str, str]:
    """The path of each source."""
    if "=" not in config.path:
        return dict.fromkeys(config.sources, config.path)
    pairs = [pair.partition("=") for pair in config.path.split(",")]
    paths = {name.strip(): path.strip() for name, _, path in pairs}
    if absent := [name for name in config.sources if not paths.get(name)]:
        raise InputError(
            f"config.data.path {config.path!r} lacks {', '.join(absent)}; write name=path,name=…"
        )
    return paths


def load_splits(
    config: DataConfig, dev: DataConfig, *, hold_out: bool, apart: bool = False
) -> tuple[LoadedSamples, LoadedSamples]:
    """The training questions that are not evaluated on, and those that are; see `load_split`."""
    held_out = load_split(dev, "dev", hold_out=hold_out, apart=apart)
    train = load_split(config, "train", hold_out=hold_out, apart=apart)
    return without_questions(train, held_out.all), held_out


def without_questions(train: LoadedSamples, held_out: Sequence[Sample]) -> LoadedSamples:
    """The training samples without those whose question is also an evaluation question.

    Lazy sources are kept whole. They have few different questions ("Where is Mary?") but many
    different documents, and their files or generators already keep the splits' stories apart.
    """
    kept = LoadedSamples({}, [*train.report])
    asked: set[str] | None = None  # evaluation documents may be lazy, and are long
    for name, samples in train.by_source.items():
        kept.by_source[name] = samples
        if isinstance(samples, LazySamples):
            continue
        asked = {sample.question for sample in held_out} if asked is None else asked
        kept.by_source[name] = left = [s for s in samples if s.question not in asked]
        if not left:
            raise InputError(
                f"every {name} training question is in config.eval.path, too; give it other data."
            )
        if dropped := len(samples) - len(left):
            line = f"{name}: {dropped} training questions left out, evaluation has them too"
            kept.report.append(line)
    return kept


class Questions(NamedTuple):
    """The questions of a run of an agent; none is in both splits. `report` says what was read."""

    train: Sequence[Sample]
    dev: Sequence[Sample]
    report: list[str]

    def passages(self) -> list[str]:
        """The different passages of all questions, in order, for an agent without a corpus."""
        every = (text for sample in (*self.train, *self.dev) for text in sample.chunks)
        return list(dict.fromkeys(every))


def load_questions(
    config: DataConfig, dev: DataConfig, *, taken_apart: bool, max_hops: int
) -> Questions:
    """Reads the questions of both splits.

    Args:
        dev: of the questions to evaluate on; the same object if a part of the data is held out.
        taken_apart: only questions with a decomposition of at most `max_hops` hops are kept.
    """
    known = [name for name, source in SOURCES.items() if source.hops]
    for settings in (config, dev) if taken_apart else ():
        for source in settings.sources:
            if not settings.path or source not in known:
                raise InputError(
                    f"'{source}' has no decompositions for the scripted agent here; use "
                    f"{', '.join(known)}, with files in config.data.path."
                )
    train, held_out = load_splits(config, dev, hold_out=dev is config, apart=taken_apart)
    report = [*train.report, *held_out.report]

    def kept(split: Split, every: Sequence[Sample]) -> Sequence[Sample]:
        if not taken_apart:
            return [*every]
        few = [s for s in every if s.decomposition and len(s.decomposition.hops) <= max_hops]
        if not few:
            raise InputError(
                f"no {split} question has a decomposition of at most config.agent.max_hops, "
                f"{max_hops}, which the scripted agent needs; give other data, or raise it."
            )
        if dropped := len(every) - len(few):
            report.append(
                f"{dropped} of {len(every)} {split} questions left out, which have no "
                f"decomposition of at most {max_hops} hops"
            )
        return few

    return Questions(kept("train", train.all), kept("dev", held_out.all), report)


_MANY = 0.1  # share of truncated texts above which it is a warning


def tokenise_samples(
    config: DataConfig, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> TokenStore:
    """Returns the samples' tokens."""
    return tokenise(samples, tokenizer, **config.token_limits(tokenizer))


def truncation_report(store: TokenStore, config: DataConfig, tokenizer: TextTokenizer) -> str:
    """One line on how many texts were cut, and by which fields; empty if none was cut.

    It is a warning if more than a tenth of the questions or chunks were.
    """
    row = config.row_tokens(tokenizer)
    chunks, of_chunks = store.cut_chunks
    if row < config.token_limits(tokenizer)["max_chunk_tokens"]:
        chunks = int((store.chunk_lengths > row).sum())
    cut = [
        (store.truncated_questions, len(store), "questions", "max_question_tokens"),
        (chunks, of_chunks, "chunks", "max_chunk_tokens"),
    ]
    said = [
        f"{some} of {every} {what} ({some / every:.0%}), by config.data.{field} = "
        f"{getattr(config, field)}"
        for some, every, what, field in cut
        if some
    ]
    if not said:
        return ""
    line = f"truncated: {'; '.join(said)}"
    if all(some <= _MANY * every for some, every, *_ in cut):
        return line
    return f"warning: {line}. What is cut off is not read: raise the field, or split the texts."

"""Loads the training or evaluation samples of a run from all of its sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.data.config import DataConfig
from qrag_jax.data.generators import haystacks
from qrag_jax.data.lazy_samples import LazySamples, joined
from qrag_jax.data.redrawn import RedrawnSamples, tokenise_redrawn
from qrag_jax.data.sample import Sample, Split, is_held_out
from qrag_jax.data.sources import babilong, niah
from qrag_jax.data.sources.registry import is_one_part, load_samples, mix_weights
from qrag_jax.data.tokens import TextTokenizer, Tokens, TokenStore, tokenise
from qrag_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class LoadedSamples:
    """Samples of one split by source, and for each source one line on what was read."""

    by_source: dict[str, Sequence[Sample]]
    report: list[str]

    @property
    def all(self) -> Sequence[Sample]:
        """The samples of all sources, one after the other."""
        return joined(list(self.by_source.values()))


def load_split(config: DataConfig, split: Split, *, hold_out: bool) -> LoadedSamples:
    """Reads the samples of every source.

    Args:
        config: the sources and where their data is.
        split: "train" or "dev".
        hold_out: whether to split a path that is a single file or split of the hub (it has no dev
            part): "dev" gets a tenth, chosen by a hash of the id, and "train" gets the rest.
            Without it, each split gets the whole file.
    """
    limit = config.limit if split == "train" else 0
    paths = paths_of(config)
    by_source: dict[str, Sequence[Sample]] = {}
    report = []
    for name in mix_weights(config.sources):
        if name == babilong.NAME:
            settings = dataclasses.replace(config.babilong, stories=paths[name])
            by_source[name], _, line = babilong.documents(settings, split, count=limit)
        elif name == niah.NAME and not paths[name]:
            by_source[name], _, line = haystacks.documents(config.niah, split, count=limit)
        else:
            path = paths[name]
            samples, read = load_samples(name, path, split, limit, config.columns)
            line = read.summary()
            if hold_out and is_one_part(path):
                samples = [s for s in samples if is_held_out(s.id) == (split == "dev")]
                line += f"; {len(samples)} of them for {split}"
                if not samples:
                    raise InputError(
                        f"{path}: too few records to hold some out for evaluation; give a folder "
                        "with train and dev files, or config.eval.path."
                    )
            by_source[name] = samples
        report.append(line)
    return LoadedSamples(by_source, report)


def without_questions(train: LoadedSamples, held_out: Sequence[Sample]) -> LoadedSamples:
    """The training samples without those whose question is also an evaluation question.

    Lazy sources are kept whole. They have few different questions ("Where is Mary?") but many
    different documents, and their files or generators already keep the splits' stories apart.
    """
    asked = {s.question for s in held_out} if not _all_lazy(train) else set()
    kept: dict[str, Sequence[Sample]] = {
        name: samples
        if isinstance(samples, LazySamples)
        else [s for s in samples if s.question not in asked]
        for name, samples in train.by_source.items()
    }
    report = list(train.report)
    for name, samples in kept.items():
        dropped = len(train.by_source[name]) - len(samples)
        if not samples:
            raise InputError(
                f"every {name} training question is also an evaluation question; give "
                "config.data.path and config.eval.path different data."
            )
        if dropped:
            report.append(f"{name}: {dropped} training questions left out, evaluation has them too")
    return LoadedSamples(kept, report)


def paths_of(config: DataConfig) -> dict[str, str]:
    """The path of each source."""
    if "=" not in config.path:
        return dict.fromkeys(config.sources, config.path)
    pairs = [pair.partition("=") for pair in config.path.split(",")]
    paths = {name.strip(): path.strip() for name, _, path in pairs}
    absent = [name for name in config.sources if not paths.get(name)]
    if absent:
        raise InputError(
            f"config.data.path {config.path!r} gives no path for {', '.join(absent)}; write "
            "name=path for every source, separated by commas."
        )
    return paths


def _all_lazy(loaded: LoadedSamples) -> bool:
    return all(isinstance(samples, LazySamples) for samples in loaded.by_source.values())


_MANY = 0.1  # share of truncated texts above which it is a warning


def tokenise_samples(
    config: DataConfig, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> TokenStore:
    """Returns the samples' tokens."""
    return tokenise(samples, tokenizer, **config.token_limits(tokenizer))


def tokenise_training(
    config: DataConfig, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> Tokens:
    """Returns the samples' tokens; redrawn samples get a store that covers every epoch."""
    if isinstance(samples, RedrawnSamples):
        return tokenise_redrawn(samples, tokenizer, **config.token_limits(tokenizer))
    return tokenise_samples(config, tokenizer, samples)


def truncation_report(store: Tokens, config: DataConfig, tokenizer: TextTokenizer) -> str:
    """One line on how many texts were cut, and by which fields; empty if none was cut.

    It is a warning if more than a tenth of the questions or chunks were.
    """
    row = config.row_tokens(tokenizer)
    chunks = store.truncated_chunks
    if row < config.token_limits(tokenizer)["max_chunk_tokens"]:
        chunks = int((store.chunk_lengths > row).sum())
    cut = [
        (store.truncated_questions, len(store), "questions", "max_question_tokens"),
        (chunks, store.chunk_texts, "chunks", "max_chunk_tokens"),
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

"""The settings of a run's data, and its training and evaluation samples from all sources."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ml_collections import ConfigDict

from qrag_jax.data.long_docs import (
    BabilongConfig,
    Documents,
    DocumentsConfig,
    NiahConfig,
    babilong_documents,
    niah_documents,
)
from qrag_jax.data.reading import is_one_part, load_samples
from qrag_jax.data.sample import SPLITS, LazySamples, Sample, Split, is_held_out, joined
from qrag_jax.data.sources import BABILONG, MUSIQUE, NIAH, SOURCES, Columns
from qrag_jax.data.sources import TITLE_SEPARATOR as AFTER_MUSIQUE
from qrag_jax.data.tokens import TextTokenizer, TokenStore, tokenise
from qrag_jax.errors import Count, InputError, Natural, Positive, least, one_of
from qrag_jax.runtime.config_fields import check_value, described, internal, section
from qrag_jax.runtime.retriever_config import TITLE_SEPARATOR
from qrag_jax.runtime.whole_files import default_cache


@dataclasses.dataclass(frozen=True)
class NegativesConfig:
    """Section `data.negatives`.

    A retriever that is trained on a question's few own passages meets a whole corpus later. Mined
    negatives are the passages of that corpus which a search takes for the right ones, such as in
    ANCE (arXiv 2007.00808) and DPR (arXiv 2004.04906).
    """

    index: str = ""  # folder that qrag_jax.index wrote; "": no passages are added
    # What searches the index: a run's or an export's folder (steps, as it was trained), another
    # encoder's folder, or "minilm". "": words are compared.
    search: str = ""
    count: Count = 10  # passages added to every training question
    skip: Natural = 0  # best ones left out first, where many good passages have no label

    def __post_init__(self) -> None:
        if self.search and not self.index:
            raise InputError("config.data.negatives.search needs an index; give that, too.")


# Settings of the sources that make their own documents.
SETTINGS: dict[str, type] = {BABILONG: BabilongConfig, NIAH: NiahConfig}


@dataclasses.dataclass(frozen=True)
class Plain:
    """The settings of other sources: none."""


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Those of section `data`, without its sources."""

    # A source's share of the episodes is proportional to: its weight ("weights"), or its weight
    # times its number of training questions ("size"; equal weights then pool all questions, as
    # Q-RAG does).
    mixture: Annotated[str, one_of(("weights", "size"))] = "weights"
    # File, folder, hub:NAME, hub:NAME,CONFIG, hub:NAME,CONFIG,SPLIT, or FILE.py:FUNCTION, which
    # runs without a sandbox; or name=path,name=path; "": the data set's own place on the hub. For
    # babilong: the folder of stories; for babilong and niah, "" means that they are made here.
    path: str = ""
    limit: Natural = 0  # training samples kept per source, 0: all
    max_question_tokens: Count = 64  # longer questions are cut
    # length of a chunk's row, [CLS] and [SEP] included
    max_chunk_tokens: Annotated[int, least(3)] = 220
    max_chunk_tokens_in_state: Count = 220  # tokens of a chunk inside a state
    # Between title and text of a passage, where a corpus with titles is embedded or shown; "": as
    # in the training's chunks (MuSiQue ". ", else a space)
    title_separator: str = ""
    # Whether supporting facts are needed in the order of the data: data, any; auto: of 2Wiki and
    # MuSiQue, whose facts follow the reasoning. Only the stage imitate reads it.
    gold_order: Annotated[str, one_of(("auto", "data", "any"))] = "auto"
    workers: Natural = 0  # processes that build batches ahead; 0: threads do it
    cache: str = ""  # folder that keeps tokens; "": $QRAG_CACHE or ~/.cache/qrag_jax
    negatives: NegativesConfig = dataclasses.field(default_factory=NegativesConfig)
    columns: Columns = dataclasses.field(default_factory=Columns)  # for the source "own"


@dataclasses.dataclass(frozen=True)
class DataConfig(_Fields):
    """Section `data`."""

    sources: Mapping[str, float] = internal(factory=dict)  # name → weight in the training mixture
    babilong: BabilongConfig = internal(factory=BabilongConfig)
    niah: NiahConfig = internal(factory=NiahConfig)

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: Any, read: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(cls.read)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> DataConfig:
        weights: dict[str, float] = {}
        settings: dict[str, Any] = {}
        for name, source in values.get("sources", {}).items():
            fields = dict(source.items())
            where = f"config.data.sources.{name}"
            weights[name] = check_value(Positive, fields.pop("weight", 1.0), f"{where}.weight")
            settings[name] = check_value(SETTINGS.get(name, Plain), fields, where)
        rest = {name: value for name, value in values.items() if name != "sources"}
        special = {name: settings[name] for name in SETTINGS.keys() & settings.keys()}
        fields = vars(check_value(_Fields, rest, "config.data"))
        return cls(**fields, sources=weights, **special)

    @classmethod
    def further_help(cls, place: str) -> list[tuple[str, Any, str]]:
        """Name, default and comment of every setting of every source."""
        lines = [(f"{place}.sources.NAME.weight", 1.0, "share of the training mixture")]
        for name, settings in SETTINGS.items():
            lines += described(settings, f"{place}.sources.{name}")
        return lines

    @property
    def ordered(self) -> frozenset[str]:
        """The sources whose supporting facts are needed in the order of the data."""
        every = frozenset(self.sources)
        by_data = frozenset(name for name in every & SOURCES.keys() if SOURCES[name].ordered)
        return {"data": every, "any": frozenset[str](), "auto": by_data}[self.gold_order]

    @property
    def passage_separator(self) -> str:
        if self.title_separator:
            return self.title_separator
        return AFTER_MUSIQUE if set(self.sources) == {MUSIQUE} else TITLE_SEPARATOR

    def at(self, path: str) -> DataConfig:
        """The same settings with another path; "" keeps the path."""
        return dataclasses.replace(self, path=path or self.path)

    def shares(self, stores: Mapping[str, TokenStore]) -> dict[str, float]:
        """Each source's share of the episodes, which sum to 1, see `mixture`."""
        by_size = self.mixture == "size"
        sizes = {name: len(store) if by_size else 1 for name, store in stores.items()}
        parts = {name: weight * sizes[name] for name, weight in self.sources.items()}
        total = math.fsum(parts.values())
        return {name: part / total for name, part in parts.items()}

    def row_tokens(self, tokenizer: TextTokenizer) -> int:
        """Tokens of a chunk that its row holds, besides the special ones."""
        return self.max_chunk_tokens - (1 if tokenizer.cls_id is None else 2)

    def tokenised(self, samples: Sequence[Sample], tokenizer: TextTokenizer) -> TokenStore:
        longest = max(self.row_tokens(tokenizer), self.max_chunk_tokens_in_state)
        limits = {"max_question_tokens": self.max_question_tokens, "max_chunk_tokens": longest}
        cache = Path(self.cache).expanduser() if self.cache else default_cache()
        return tokenise(samples, tokenizer, **limits, cache=cache)

    @property
    def backgrounds(self) -> list[DocumentsConfig]:
        """The settings of the sources that make their own documents among background text."""
        every: list[DocumentsConfig] = [self.babilong] if BABILONG in self.sources else []
        makes = NIAH in self.sources and not self.path and self.niah.knobs.haystack == "essay"
        return [*every, self.niah] if makes else every


def sources_section(names: Iterable[str]) -> ConfigDict:
    """The section `data.sources`: the weight of each in the mixture, and its own settings."""
    return ConfigDict({name: section(SETTINGS.get(name, Plain), weight=1.0) for name in names})


# ---------------------------------------------------------------- samples of all sources


class LoadedSamples(NamedTuple):
    """Samples of one split by source, and for each source one line on what was read."""

    by_source: dict[str, Sequence[Sample]]
    report: list[str]

    @property
    def all(self) -> Sequence[Sample]:
        return joined(list(self.by_source.values()))


def load_split(
    config: DataConfig, split: Split, *, hold_out: bool, apart: bool = False
) -> LoadedSamples:
    """Reads the samples of every source, `apart`: with decompositions, if they have some.

    A path that is one file or split of the hub has no dev part. With `hold_out`, "dev" gets a tenth
    of it, chosen by a hash of the id, and "train" the rest; without, each gets all of it.
    """
    limit = config.limit if split == "train" else 0
    if not config.sources:
        raise InputError("data.sources names no source; give one at least")
    paths = _paths(config)
    loaded = LoadedSamples({}, [])
    for name in config.sources:
        path = paths[name]
        samples: Sequence[Sample]
        if name == BABILONG:
            settings = dataclasses.replace(config.babilong, stories=path)
            samples, *_, line = babilong_documents(settings, split, count=limit)
        elif name == NIAH and not path:
            samples, *_, line = niah_documents(config.niah, split, count=limit)
        else:
            samples, read = load_samples(name, path, split, limit, config.columns, apart=apart)
            line = read.summary()
            if hold_out and is_one_part(path):
                samples = [s for s in samples if is_held_out(s.id) == (split == "dev")]
                line += f"; {len(samples)} of them for {split}"
                if not samples:
                    raise InputError(f"{path}: too few records to hold out; give config.eval.path.")
        loaded.by_source[name] = samples
        loaded.report.append(line)
    return loaded


def _paths(config: DataConfig) -> dict[str, str]:
    if "=" not in config.path:
        return dict.fromkeys(config.sources, config.path)
    pairs = [pair.partition("=") for pair in config.path.split(",")]
    paths = {name.strip(): path.strip() for name, _, path in pairs}
    if absent := [name for name in config.sources if not paths.get(name)]:
        raise InputError(f"config.data.path {config.path!r} lacks {', '.join(absent)}; add them")
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

    Lazy sources are kept whole: they have few different questions ("Where is Mary?"), and keep the
    documents of the splits apart.
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
            raise InputError(f"config.eval.path has every {name} training question; give others.")
        if dropped := len(samples) - len(left):
            line = f"{name}: {dropped} training questions left out, evaluation has them too"
            kept.report.append(line)
    return kept


def load_questions(
    config: DataConfig, dev: DataConfig, *, taken_apart: bool, max_hops: int
) -> tuple[list[Sample], list[Sample], list[str]]:
    """The questions to train on, those to evaluate on, and lines on what was read.

    No question is in both; a part is held out if `dev` is `config` itself. With `taken_apart`, only
    those with a decomposition of at most `max_hops` hops are kept.
    """
    known = [name for name, source in SOURCES.items() if source.hops]
    for settings in (config, dev) if taken_apart else ():
        for source in settings.sources:
            if not settings.path or source not in known:
                raise InputError(f"'{source}' has no hops; use {', '.join(known)}, from files.")
    parts = load_splits(config, dev, hold_out=dev is config, apart=taken_apart)
    report = [line for part in parts for line in part.report]
    if not taken_apart:
        return [*parts[0].all], [*parts[1].all], report
    kept = []
    for split, part in zip(SPLITS, parts):
        every, needed = part.all, f"decomposition of at most {max_hops} hops"
        few = [s for s in every if 0 < len(s.hops) <= max_hops]
        if not few:
            fix = "which the scripted agent needs; give other data, or raise config.agent.max_hops."
            raise InputError(f"no {split} question has a {needed}, {fix}")
        if dropped := len(every) - len(few):
            left_out = f"{dropped} of {len(every)} {split} questions left out"
            report.append(f"{left_out}, which have no {needed}")
        kept.append(few)
    return kept[0], kept[1], report


_MANY = 0.1  # share of truncated texts above which it is a warning


def truncation_report(store: TokenStore, config: DataConfig, tokenizer: TextTokenizer) -> str:
    """One line on how many texts were cut, a warning if many were; "": none was."""
    row = config.row_tokens(tokenizer)
    chunks, of_chunks = store.cut_chunks
    if row < config.max_chunk_tokens_in_state:
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
    line = f"truncated: {'; '.join(said)}" if said else ""
    if all(some <= _MANY * every for some, every, *_ in cut):
        return line
    return f"warning: {line}. What is cut off is not read: raise the field, or split the texts."


def documents_of_lengths(
    config: DataConfig, counts: Mapping[int, int], *, every_story: bool = False
) -> dict[int, Documents]:
    """The first documents of each length, so many, from the stories that fit the shortest one.

    Short documents have room only for short stories, which are the easy ones. If each length used
    all stories that fit it (`every_story`), a retriever would look worse on longer documents for
    that reason alone.
    """
    names = [name for name, weight in config.sources.items() if weight]
    if names == [BABILONG]:
        limits = (config.babilong.most_facts, 0 if every_story else min(counts))
        most = min(filter(None, limits), default=0)
        settings = dataclasses.replace(config.babilong, stories=config.path, most_facts=most)
        return {n: babilong_documents(settings, "dev", n, count) for n, count in counts.items()}
    if names == [NIAH] and not config.path:
        return {n: niah_documents(config.niah, "dev", n, count) for n, count in counts.items()}
    raise InputError(f"{', '.join(names)} has one length; score babilong, or niah without files.")

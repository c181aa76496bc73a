"""Settings of a run's data: what the run reads, and how long texts may be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from ml_collections import ConfigDict

from qrag_jax.data.long_docs import BabilongConfig, NiahConfig
from qrag_jax.data.noise import DocumentsConfig
from qrag_jax.data.sources import BABILONG, MUSIQUE, NIAH, Columns
from qrag_jax.data.sources import TITLE_SEPARATOR as AFTER_MUSIQUE
from qrag_jax.data.tokens import TextTokenizer, TokenStore
from qrag_jax.errors import Count, InputError, Natural, Positive, least, one_of
from qrag_jax.runtime.config_fields import check_value, described, fill, internal, section
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
            raise InputError(
                "config.data.negatives.search needs an index; give config.data.negatives.index."
            )


_ORDERED = frozenset({"two_wiki", MUSIQUE})
# Settings of the sources that make their own documents.
SETTINGS: dict[str, type] = {BABILONG: BabilongConfig, NIAH: NiahConfig}


@dataclasses.dataclass(frozen=True)
class Plain:
    """The settings of other sources: none."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Section `data`."""

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
    sources: Mapping[str, float] = internal(factory=dict)  # name → weight in the training mixture
    babilong: BabilongConfig = internal(factory=BabilongConfig)
    niah: NiahConfig = internal(factory=NiahConfig)

    @classmethod
    def read(cls, given: Mapping[str, Any], place: str) -> DataConfig:
        """The settings that a section holds; see `config_fields.fill`."""
        weights: dict[str, float] = {}
        settings: dict[str, Any] = {}
        for name, source in given.get("sources", {}).items():
            fields = dict(source.items())
            weight, field = fields.pop("weight", 1.0), f"config.{place}.sources.{name}.weight"
            weights[name] = check_value(Positive, weight, field)
            settings[name] = fill(SETTINGS.get(name, Plain), fields, f"{place}.sources.{name}")
        rest = {name: value for name, value in given.items() if name != "sources"}
        own = {name: settings[name] for name in SETTINGS.keys() & settings.keys()}
        return dataclasses.replace(fill(cls, rest, place), sources=weights, **own)

    @classmethod
    def further_help(cls, place: str) -> list[tuple[str, Any, str]]:
        """Name, default and comment of every setting of every source."""
        lines = [(f"{place}.sources.NAME.weight", 1.0, "share of the training mixture")]
        for name, settings in SETTINGS.items():
            lines += described(settings, f"{place}.sources.{name}")
        return lines

    @property
    def cache_folder(self) -> Path:
        """The folder that keeps tokens and generated corpora between runs."""
        return Path(self.cache).expanduser() if self.cache else default_cache()

    @property
    def ordered(self) -> frozenset[str]:
        """The sources whose supporting facts are needed in the order of the data."""
        every = frozenset(self.sources)
        known = {"data": every, "any": frozenset[str](), "auto": every & _ORDERED}
        return known[self.gold_order]

    @property
    def passage_separator(self) -> str:
        """Between a passage's title and its text."""
        if self.title_separator:
            return self.title_separator
        return AFTER_MUSIQUE if set(self.sources) == {MUSIQUE} else TITLE_SEPARATOR

    def at(self, path: str) -> DataConfig:
        """The same settings with another path; "" keeps the path."""
        return dataclasses.replace(self, path=path or self.path)

    def shares(self, stores: Mapping[str, TokenStore]) -> dict[str, float]:
        """Each source's share of the training episodes."""
        sizes = {name: len(store) for name, store in stores.items()}
        return mix_weights(self.sources, sizes if self.mixture == "size" else None)

    def row_tokens(self, tokenizer: TextTokenizer) -> int:
        """Tokens of a chunk that its row holds, besides the special ones."""
        return self.max_chunk_tokens - (1 if tokenizer.cls_id is None else 2)

    def token_limits(self, tokenizer: TextTokenizer) -> dict[str, Any]:
        """How texts are cut and where their tokens are kept, for `tokens.tokenise`."""
        longest = max(self.row_tokens(tokenizer), self.max_chunk_tokens_in_state)
        return {
            "max_question_tokens": self.max_question_tokens,
            "max_chunk_tokens": longest,
            "cache": self.cache_folder,
        }

    @property
    def backgrounds(self) -> list[DocumentsConfig]:
        """The settings of the sources that make their own documents among background text."""
        every: list[DocumentsConfig] = [self.babilong] if BABILONG in self.sources else []
        makes = NIAH in self.sources and not self.path and self.niah.knobs.haystack == "essay"
        return [*every, self.niah] if makes else every


def sources_section(names: Iterable[str]) -> ConfigDict:
    """The section `data.sources`: the weight of each in the mixture, and its own settings."""
    return ConfigDict({name: section(SETTINGS.get(name, Plain), weight=1.0) for name in names})


def mix_weights(
    weights: Mapping[str, float], sizes: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Each source's share of a mixture; the shares sum to 1.

    With `sizes`, the numbers of training questions, a share is proportional to weight times size,
    so that equal weights pool the questions of all sources, as in Q-RAG's combined runs.
    """
    if not weights:
        raise InputError("data.sources names no source; give one weight at least")
    parts = {name: weight * (sizes[name] if sizes else 1) for name, weight in weights.items()}
    total = math.fsum(parts.values())
    return {name: part / total for name, part in parts.items()}

"""Search in one step: by an encoder that was not trained to search in several, or by words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.retrieval.opening import (
    BM25,
    BOOLEAN,
    CORPUS,
    EXACT,
    FAISS,
    HYBRID,
    OF_WORDS,
    QDRANT,
    SCAN,
    IndexAt,
)
from qrag_jax.retrieval.own_documents import GOLDEN, LEXICAL, RETRIEVERS, SEMANTIC
from qrag_jax.rollouts.libraries import CorpusLibrary
from qrag_jax.serving.searcher import MultiStep, Searcher, SingleStep
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.retriever import LoadSettings, Retriever

BY_VECTORS = (EXACT, QDRANT, FAISS, SCAN, HYBRID)
BY_WORDS = OF_WORDS


@dataclasses.dataclass(frozen=True)
class PlainEncoder:
    """An encoder of one kind of texts.

    Attributes:
        path: a folder, a hub name, or "minilm".
        config: how it computes, with the prefixes of questions (`state_prefix`) and of passages;
            the latter as the index was built.
        max_tokens: longest row, as the index was built; 0: as its folder says.
    """

    path: str
    config: EncoderConfig = dataclasses.field(default_factory=EncoderConfig)
    max_tokens: int = 0


class QuestionTower:
    """What makes vectors of questions; see `retrieval.multi_step.QuestionEncoder`.

    Attributes:
        title_separator: between titles and texts of the passages that it compares them with.

    Args:
        encoder: as it embeds passages; questions have its prefix of states.
    """

    def __init__(self, encoder: PassageEncoder) -> None:
        self._tokenizer, self._form = encoder.tokenizer, encoder.encoder
        self.title_separator = encoder.title_separator
        self._room = encoder.row_tokens - len(self._form.state_opening) - 1
        if self._room < 1:
            raise InputError(
                f"the prefix of questions leaves them no room in rows of {encoder.row_tokens} "
                "tokens; give a shorter --question_prefix."
            )
        self._tower = encoder.tower()

    def cut(self, questions: Sequence[str]) -> list[int]:
        """The indices of the questions that have more tokens than a row."""
        ids = self._tokenizer.encode(questions)
        return [place for place, own in enumerate(ids) if len(own) > self._room]

    def __call__(self, questions: Sequence[str]) -> np.ndarray:
        """float32 `[questions, width]`; questions that are too long are cut."""
        opening, end = self._form.state_opening, self._form.sep_id
        ids = self._tokenizer.encode(questions)
        return self._tower([[*opening, *own[: self._room], end] for own in ids])


def open_plain(index: IndexAt, encoder: PlainEncoder | None = None) -> SingleStepSearch:
    """Opens an index with the encoder that embedded it.

    Args:
        encoder: None: the index compares words.
    """
    if encoder is None:
        otherwise = (
            "give what makes vectors of questions: --workdir=RUN, --retriever=EXPORT or "
            "--encoder=FOLDER"
        )
        return SingleStepSearch(index.settled(BY_WORDS, otherwise).open())
    index = index.settled(BY_VECTORS, "leave --encoder out, or index the corpus with the encoder")
    own = PassageEncoder.of_folder(encoder.path, encoder.config, max_tokens=encoder.max_tokens)
    if index.encoder != (digest := own.digest()):
        raise InputError(
            f"{index.folder} was embedded by another encoder, or with another dtype, pooling, "
            "prefix or length, than those given; give the ones that it was built with."
        )
    return SingleStepSearch(index.open(digest), QuestionTower(own))


@dataclasses.dataclass(frozen=True)
class ServedSearch:
    """Which search is served; with neither a retriever nor an encoder it compares words.

    Attributes:
        retriever: folder of an export or of a run, which searches in steps as it was trained.
        encoder: a plain encoder, which searches in one step.
    """

    index: IndexAt
    retriever: str = ""
    settings: LoadSettings = dataclasses.field(default_factory=LoadSettings)
    encoder: PlainEncoder | None = None

    def open(self) -> Searcher:
        """Loads it."""
        if not self.retriever:
            return SingleStep(open_plain(self.index, self.encoder))
        retriever = Retriever.load(self.retriever, self.settings)
        retriever.open_at(self.index)
        return MultiStep(retriever.multi_step)


# Retriever → engine; "": the usual of vectors.
_ENGINES = {BM25: BM25, LEXICAL: BM25, SEMANTIC: "", HYBRID: HYBRID, BOOLEAN: BOOLEAN}


def open_corpus(
    where: str,
    retriever: str,
    encoder: PlainEncoder,
    fields: tuple[str, str, str],
    *,
    clean: bool,
) -> CorpusLibrary:
    """Opens the index of a corpus that all questions share.

    Args:
        retriever: golden, bm25 (lexical), semantic, hybrid or boolean.
        encoder: of what compares vectors; its path may be "" where words are compared.
        fields: names of the config's fields that say these three, for messages.
    """
    folder, (of_folder, of_retriever, of_encoder) = Path(where).expanduser(), fields
    if not (folder / CORPUS).is_dir():
        raise InputError(
            f"{of_folder} is {where}, which holds no index; build one there with qrag index "
            "--corpus=FILE --index=FOLDER."
        )
    corpus = StoredCorpus(folder / CORPUS)
    if retriever == GOLDEN:
        return CorpusLibrary(corpus, None, clean)
    if retriever not in _ENGINES:
        # Boolean search is the query writers' alone.
        both = (name for name in RETRIEVERS if name == GOLDEN or name in _ENGINES)
        raise InputError(
            f"the retriever {retriever!r} is for a question's own documents; with {of_folder} use "
            f"one of {', '.join(both)}."
        )
    engine, by_vectors = _ENGINES[retriever], _ENGINES[retriever] not in BY_WORDS
    if by_vectors and not encoder.path:
        raise InputError(
            f"the retriever {retriever!r} compares vectors; name the encoder that {where} was "
            f"indexed with in {of_encoder}, or use bm25."
        )
    usable = BY_VECTORS if by_vectors else BY_WORDS
    index = IndexAt(folder, engine).settled(usable, f"use another {of_retriever}")
    return CorpusLibrary(corpus, open_plain(index, encoder if by_vectors else None), clean)


def prefixed(path: str, question_prefix: str, passage_prefix: str) -> PlainEncoder:
    """An encoder with the texts that go before questions and, as the index was built, passages."""
    computes = EncoderConfig(state_prefix=question_prefix, chunk_prefix=passage_prefix)
    return PlainEncoder(path, computes)

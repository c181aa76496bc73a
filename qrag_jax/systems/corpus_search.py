"""Opens the index of a corpus that all questions share, as what agents search."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from qrag_jax.errors import InputError
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.opening import BM25, BOOLEAN, CORPUS, HYBRID, IndexAt
from qrag_jax.retrieval.own_documents import GOLDEN, LEXICAL, RETRIEVERS, SEMANTIC
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.systems.plain_search import BY_VECTORS, BY_WORDS, PlainEncoder, open_plain

# Retriever → engine; "": the usual of vectors.
_ENGINES = {BM25: BM25, LEXICAL: BM25, SEMANTIC: "", HYBRID: HYBRID, BOOLEAN: BOOLEAN}


class FieldNames(NamedTuple):
    """Names of fields of a config, such as "config.tools.corpus"."""

    folder: str
    retriever: str
    encoder: str


@dataclasses.dataclass(frozen=True)
class CorpusSearch:
    """What is searched, and how.

    Attributes:
        folder: of an index, as `qrag index` builds it.
        retriever: golden, bm25 (lexical), semantic, hybrid or boolean.
        fields: where the config names these, for messages.
        encoder: folder or hub name of what embedded the passages; "": words are compared.
        question_prefix, passage_prefix: of the encoder; the latter as the index was built.
    """

    folder: str
    retriever: str
    fields: FieldNames
    encoder: str = ""
    question_prefix: str = ""
    passage_prefix: str = ""

    @property
    def plain_encoder(self) -> PlainEncoder:
        """The encoder, and how it computes."""
        computes = EncoderConfig(
            state_prefix=self.question_prefix, chunk_prefix=self.passage_prefix
        )
        return PlainEncoder(self.encoder, computes)


def open_corpus(search: CorpusSearch, clean: bool) -> CorpusLibrary:
    """Opens the index.

    Args:
        clean: see `CorpusLibrary`.
    """
    folder = Path(search.folder).expanduser()
    if not (folder / CORPUS).is_dir():
        raise InputError(
            f"{search.fields.folder} is {search.folder}, which holds no index; build one there "
            "with qrag index --corpus=FILE --index=FOLDER."
        )
    corpus = StoredCorpus(folder / CORPUS)
    if search.retriever == GOLDEN:
        return CorpusLibrary(corpus, None, clean)
    if search.retriever not in _ENGINES:
        # Boolean search is the query writers' alone.
        both = (name for name in RETRIEVERS if name == GOLDEN or name in _ENGINES)
        raise InputError(
            f"the retriever {search.retriever!r} is for a question's own documents; with "
            f"{search.fields.folder} use one of {', '.join(both)}."
        )
    engine, encoder = _ENGINES[search.retriever], None
    if engine not in BY_WORDS:
        if not search.encoder:
            raise InputError(
                f"the retriever {search.retriever!r} compares vectors; name the encoder that "
                f"{search.folder} was indexed with in {search.fields.encoder}, or use bm25."
            )
        encoder = search.plain_encoder
    usable = BY_VECTORS if encoder else BY_WORDS
    index = IndexAt(folder, engine).settled(usable, f"use another {search.fields.retriever}")
    return CorpusLibrary(corpus, open_plain(index, encoder), clean)

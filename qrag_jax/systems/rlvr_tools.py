"""What the tools of RLVR read: a question's own documents, or a corpus, by the retriever's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from qrag_jax.errors import InputError
from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.opening import BM25, CORPUS, HYBRID, IndexAt
from qrag_jax.retrieval.own_documents import (
    GOLDEN,
    LEXICAL,
    SEMANTIC,
    KeptVectors,
    own_retriever,
)
from qrag_jax.retrieval.scorers import EmbeddingScorer, EndpointScorer, Scorer
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.rollouts.own_library import OwnLibrary
from qrag_jax.rollouts.token_episodes import Library
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.plain_search import (
    BY_VECTORS,
    BY_WORDS,
    PlainEncoder,
    QuestionTower,
    open_plain,
)
from qrag_jax.systems.rlvr_config import RlvrConfig, ToolsConfig

_WAIT = 60.0  # seconds that a search waits for a rerank service that is down
_ENGINES = {BM25: BM25, LEXICAL: BM25, SEMANTIC: "", HYBRID: HYBRID}  # "": the usual of vectors


def open_library(config: RlvrConfig, mesh: Mesh) -> Library:
    """What the tools read.

    Raises:
        InputError: the retriever is unknown or lacks what scores for it, or the corpus has no index
            for it.
    """
    tools = config.tools
    if tools.corpus:
        return _open_corpus(tools, config.tasks.clean)
    return OwnLibrary(own_retriever(tools.retriever, scorer_of(tools, mesh)))


def scorer_of(tools: ToolsConfig, mesh: Mesh) -> Scorer | None:
    """The scorer that the config names; None if it names none.

    Raises:
        InputError: two are named, or the encoder cannot be used.
    """
    if tools.encoder and tools.rerank_url:
        raise InputError(
            "config.tools.encoder and config.tools.rerank_url both name what scores documents; "
            "leave one of them empty."
        )
    if tools.rerank_url:
        prefix = "config.tools.rerank_"
        config = ClientConfig(tools.rerank_url, tools.rerank_model, wait_limit=_WAIT, prefix=prefix)
        return EndpointScorer(Client(config))
    if tools.encoder:
        encoder = PassageEncoder.of_folder(tools.encoder, _computes(tools), mesh)
        tower = encoder.tower()

        def passages(texts: Sequence[str]) -> np.ndarray:
            ids = encoder.tokenizer.encode(texts)
            return tower([encoder.row(own).tolist() for own in ids])

        return EmbeddingScorer(QuestionTower(encoder), KeptVectors(passages))
    return None


def _computes(tools: ToolsConfig) -> EncoderConfig:
    return EncoderConfig(state_prefix=tools.question_prefix, chunk_prefix=tools.passage_prefix)


def _open_corpus(tools: ToolsConfig, clean: bool) -> CorpusLibrary:
    folder = Path(tools.corpus).expanduser()
    if tools.rerank_url:
        raise InputError(
            "config.tools.corpus names a corpus, which config.tools.rerank_url cannot search; use "
            "config.tools.encoder or the retriever bm25, and leave the URL empty."
        )
    if not (folder / CORPUS).is_dir():
        raise InputError(
            f"config.tools.corpus is {tools.corpus}, which holds no index; build one there with "
            "qrag index --corpus=FILE --index=FOLDER."
        )
    corpus = StoredCorpus(folder / CORPUS)
    if tools.retriever == GOLDEN:
        return CorpusLibrary(corpus, None, clean)
    if tools.retriever not in _ENGINES:
        raise InputError(
            f"the retriever {tools.retriever!r} is for a question's own documents; with "
            f"config.tools.corpus use one of {', '.join((GOLDEN, *_ENGINES))}."
        )
    engine, encoder = _ENGINES[tools.retriever], None
    if engine != BM25:
        if not tools.encoder:
            raise InputError(
                f"the retriever {tools.retriever!r} compares vectors; name the encoder that "
                f"{tools.corpus} was indexed with in config.tools.encoder, or use bm25."
            )
        encoder = PlainEncoder(tools.encoder, _computes(tools))
    usable = BY_VECTORS if encoder else BY_WORDS
    index = IndexAt(folder, engine).settled(usable, "use another config.tools.retriever")
    return CorpusLibrary(corpus, open_plain(index, encoder), clean)

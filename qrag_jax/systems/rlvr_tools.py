"""What the tools of RLVR read: a question's own documents, or a corpus, by the retriever's name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from qrag_jax.errors import InputError
from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.retrieval.own_documents import KeptVectors, own_retriever
from qrag_jax.retrieval.scorers import EmbeddingScorer, EndpointScorer, Scorer
from qrag_jax.rollouts.own_library import OwnLibrary
from qrag_jax.rollouts.token_episodes import Library
from qrag_jax.systems.corpus_search import CorpusSearch, FieldNames, open_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.plain_search import QuestionTower
from qrag_jax.systems.rlvr_config import RlvrConfig, ToolsConfig

_WAIT = 60.0  # seconds that a search waits for a rerank service that is down
_FIELDS = FieldNames("config.tools.corpus", "config.tools.retriever", "config.tools.encoder")


def open_library(config: RlvrConfig, mesh: Mesh) -> Library:
    """What the tools read."""
    tools = config.tools
    if tools.corpus:
        return open_corpus(_corpus_search(tools), config.tasks.clean)
    return OwnLibrary(own_retriever(tools.retriever, scorer_of(tools, mesh)))


def scorer_of(tools: ToolsConfig, mesh: Mesh) -> Scorer | None:
    """The scorer that the config names; None if it names none."""
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


def told_documents(tools: ToolsConfig) -> str:
    """What the tools read, in words."""
    return f"the corpus in {tools.corpus}" if tools.corpus else "each question's documents"


def _computes(tools: ToolsConfig) -> EncoderConfig:
    return EncoderConfig(state_prefix=tools.question_prefix, chunk_prefix=tools.passage_prefix)


def _corpus_search(tools: ToolsConfig) -> CorpusSearch:
    if tools.rerank_url:
        raise InputError(
            "config.tools.corpus names a corpus, which config.tools.rerank_url cannot search; use "
            "config.tools.encoder or the retriever bm25, and leave the URL empty."
        )
    return CorpusSearch(
        folder=tools.corpus,
        retriever=tools.retriever,
        fields=_FIELDS,
        encoder=tools.encoder,
        question_prefix=tools.question_prefix,
        passage_prefix=tools.passage_prefix,
    )

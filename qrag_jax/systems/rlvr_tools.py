"""What scores a question's documents for the retrievers of RLVR that need it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from qrag_jax.errors import InputError
from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.retrieval.own_documents import KeptVectors
from qrag_jax.retrieval.scorers import EmbeddingScorer, EndpointScorer, Scorer
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.plain_search import QuestionTower
from qrag_jax.systems.rlvr_config import ToolsConfig

_WAIT = 60.0  # seconds that a search waits for a rerank service that is down


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
        encoder = PassageEncoder.of_folder(tools.encoder, mesh=mesh)
        tower = encoder.tower()

        def passages(texts: Sequence[str]) -> np.ndarray:
            ids = encoder.tokenizer.encode(texts)
            return tower([encoder.row(own).tolist() for own in ids])

        return EmbeddingScorer(QuestionTower(encoder), KeptVectors(passages))
    return None

"""A search as a retriever of LlamaIndex."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from qrag_jax.integrations import Searches, imported, metadata_of

with imported("llamaindex"):
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

_NOT_FOR_MODELS = ["step"]  # metadata that LlamaIndex writes into no prompt


class QRagRetriever(BaseRetriever):
    """Nodes of a search, step by step, the best of a step first; their scores are Q-values.

    For the arguments see `qrag_jax.integrations`; `base` are those of LlamaIndex's `BaseRetriever`.
    """

    def __init__(
        self,
        retriever: Searches,
        similarity_top_k: int | None = None,
        search_kwargs: Mapping[str, Any] | None = None,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.retriever, self.similarity_top_k = retriever, similarity_top_k
        self.search_kwargs = search_kwargs or {}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Nodes; their metadata also have title and step."""
        query, topk = query_bundle.query_str, self.similarity_top_k
        hits = self.retriever.search(query, topk=topk, **self.search_kwargs)
        return [
            NodeWithScore(
                node=TextNode(
                    id_=hit.id,
                    text=hit.text,
                    metadata=metadata_of(hit),
                    excluded_llm_metadata_keys=_NOT_FOR_MODELS,
                    excluded_embed_metadata_keys=_NOT_FOR_MODELS,
                ),
                score=hit.score,
            )
            for hit in hits
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

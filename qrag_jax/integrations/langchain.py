"""A search as a retriever of LangChain."""

from __future__ import annotations

from typing import Any

from qrag_jax.integrations import Searches, imported, metadata_of

with imported("langchain"):
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from pydantic import Field


class QRagRetriever(BaseRetriever):
    """Documents of a search, step by step, the best of a step first.

    `invoke` takes `k`, `where`, `steps`, `beam` and `threshold` of single calls. LangChain runs
    `ainvoke` and `batch` in threads.
    """

    # See `qrag_jax.integrations`.
    retriever: Searches
    k: int | None = None
    search_kwargs: dict[str, Any] = Field(default_factory=dict)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **changes: Any
    ) -> list[Document]:
        """Documents; their metadata also have title, step and score (the Q-value)."""
        topk = changes.pop("k", self.k)
        hits = self.retriever.search(query, topk=topk, **self.search_kwargs | changes)
        about = [{**metadata_of(hit), "score": hit.score} for hit in hits]
        return [Document(id=h.id, page_content=h.text, metadata=m) for h, m in zip(hits, about)]

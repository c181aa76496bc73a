"""A search as a component of Haystack.

In a pipeline's file the retriever is the folders it is opened from, or the URL of a server:

    retriever: {folder: exported, index: my-index}   # or {url: "http://127.0.0.1:8000"}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.integrations import RemoteRetriever, Searches, imported, metadata_of
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.whole_files import reading
from qrag_jax.systems.retriever import Deployment, Retriever

with imported("haystack"):
    from haystack import Document, component, default_to_dict


@component
class QRagRetriever:
    """Documents of a search, step by step, the best of a step first; their scores are Q-values.

    Haystack runs it in threads where it is asynchronous. The retriever is what searches, or the
    fields of `Deployment` or of `RemoteRetriever`, which `warm_up` opens. For the other arguments
    see `qrag_jax.integrations`.
    """

    def __init__(
        self,
        retriever: Searches | Mapping[str, Any],
        top_k: int | None = None,
        search_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.retriever, self.top_k, self.search_kwargs = retriever, top_k, search_kwargs or {}

    def warm_up(self) -> None:
        fields = self.retriever
        if not isinstance(fields, Mapping):
            return
        remote = "url" in fields and "folder" not in fields
        kind: type[RemoteRetriever | Deployment] = RemoteRetriever if remote else Deployment
        with reading("the component's field retriever", "give url, or folder and index"):
            value = bounded_json.typed(kind, dict(fields))
        self.retriever = value.open() if isinstance(value, Deployment) else value

    def to_dict(self) -> dict[str, Any]:
        fields: Any = self.retriever
        if isinstance(fields, Retriever):
            fields = fields.deployment
        if isinstance(fields, Deployment | RemoteRetriever):
            fields = dataclasses.asdict(fields)
        if not isinstance(fields, Mapping):
            raise InputError(f"a pipeline's file cannot name a {type(fields).__name__}.")
        settings = {"top_k": self.top_k, "search_kwargs": self.search_kwargs}
        return default_to_dict(self, retriever=dict(fields), **settings)

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, top_k: int | None = None, where: dict[str, Any] | None = None
    ) -> dict[str, list[Document]]:
        """Searches; without `top_k` or `where` with those of the component."""
        self.warm_up()
        settings = self.search_kwargs if where is None else {**self.search_kwargs, "where": where}
        topk = self.top_k if top_k is None else top_k
        searches: Any = self.retriever
        hits = searches.search(query, topk=topk, **settings)
        docs = [Document(id=h.id, content=h.text, meta=metadata_of(h), score=h.score) for h in hits]
        return {"documents": docs}

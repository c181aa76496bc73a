"""A search as a component of Haystack.

    from qrag_jax.integrations.haystack import QRagRetriever

    pipeline.add_component("retriever", QRagRetriever(retriever, top_k=4))

In a pipeline's file the retriever is the folders it is opened from, or the URL of a server:

    type: qrag_jax.integrations.haystack.QRagRetriever
    init_parameters:
      retriever: {folder: exported, index: my-index}   # or {url: "http://127.0.0.1:8000"}
      top_k: 4

`Pipeline.load(file, allowed_modules=["qrag_jax.integrations.haystack"])` reads it: Haystack opens
classes of other packages only where that is said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.integrations import Searches, imported, metadata_of
from qrag_jax.integrations.remote import RemoteRetriever
from qrag_jax.runtime import bounded_json
from qrag_jax.systems.retriever import Deployment, Retriever

with imported("haystack", "haystack-ai", "haystack"):
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
        if isinstance(self.retriever, Mapping):
            self.retriever = _opened(self.retriever)

    def to_dict(self) -> dict[str, Any]:
        settings = {"top_k": self.top_k, "search_kwargs": self.search_kwargs}
        return default_to_dict(self, retriever=_fields(self.retriever), **settings)

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, top_k: int | None = None, where: dict[str, Any] | None = None
    ) -> dict[str, list[Document]]:
        """Searches; without `top_k` or `where` with those of the component."""
        self.warm_up()
        assert isinstance(self.retriever, Searches)
        settings = self.search_kwargs if where is None else {**self.search_kwargs, "where": where}
        topk = self.top_k if top_k is None else top_k
        hits = self.retriever.search(query, topk=topk, **settings)
        documents = [
            Document(id=hit.id, content=hit.text, meta=metadata_of(hit), score=hit.score)
            for hit in hits
        ]
        return {"documents": documents}


def _fields(retriever: Searches | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(retriever, Mapping):
        return dict(retriever)
    found = retriever.deployment if isinstance(retriever, Retriever) else retriever
    if isinstance(found, Deployment | RemoteRetriever):
        return dataclasses.asdict(found)
    raise InputError(
        f"a pipeline's file cannot name a {type(retriever).__name__}; use a Retriever or a "
        "RemoteRetriever."
    )


def _opened(fields: Mapping[str, Any]) -> Searches:
    kind: type[RemoteRetriever | Deployment] = Deployment
    if "url" in fields and "folder" not in fields:
        kind = RemoteRetriever
    try:
        found = bounded_json.typed(kind, dict(fields))
    except ValueError as error:
        raise InputError(
            f"the component's field retriever cannot be read ({error}); give url, or folder and "
            "index."
        ) from None
    return found.open() if isinstance(found, Deployment) else found

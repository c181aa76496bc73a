"""A search as a module of DSPy, and as its retrieval model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from qrag_jax.integrations import Searches, imported
from qrag_jax.retrieval.multi_step import Hit

with imported("dspy"):
    import dspy
    from dspy.dsp.utils import dotdict


class QRagRetriever(dspy.Module):
    """Passages of a search, step by step, the best of a step first.

    Copies, of which optimizers make many, share the retriever. It has nothing that they learn. For
    the arguments see `qrag_jax.integrations`.
    """

    def __init__(
        self,
        retriever: Searches,
        k: int | None = None,
        search_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.retriever, self.k, self.search_kwargs = retriever, k, dict(search_kwargs or {})

    def forward(self, query: str, k: int | None = None, **changes: Any) -> dspy.Prediction:
        """Passages as texts, in `passages`, and next to them ids, steps, scores and metadata."""
        hits = self._hits(query, k, changes)
        return dspy.Prediction(
            passages=[_text(hit) for hit in hits],
            ids=[hit.id for hit in hits],
            steps=[hit.step for hit in hits],
            scores=[hit.score for hit in hits],
            metadata=[dict(hit.metadata) for hit in hits],
        )

    async def aforward(self, query: str, k: int | None = None, **changes: Any) -> dspy.Prediction:
        return await asyncio.to_thread(self.forward, query, k, **changes)

    def rm(self, query: str, k: int | None = None, **changes: Any) -> list[dotdict]:
        """Passages as `dspy.Retrieve` takes them, with their texts in `long_text`."""
        rows = []
        for hit in self._hits(query, k, changes):
            fields = hit._asdict() | {"metadata": dict(hit.metadata), "long_text": _text(hit)}
            del fields["text"]
            rows.append(dotdict(**fields))
        return rows

    def _hits(self, query: str, k: int | None, changes: Mapping[str, Any]) -> list[Hit]:
        settings = {"topk": self.k if k is None else k, **self.search_kwargs, **changes}
        return self.retriever.search(query, **settings)


def _text(hit: Hit) -> str:
    """Title and text as in DSPy's own collections, whose programs look for the bar."""
    return f"{hit.title} | {hit.text}" if hit.title else hit.text

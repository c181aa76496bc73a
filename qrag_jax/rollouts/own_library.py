"""The documents that each question brings along, as what an agent's tools read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.environments.episode import Document, Look, Open, ToolTask
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.own_documents import DocumentSearch, OwnRetriever


@dataclasses.dataclass(frozen=True)
class OwnLibrary:
    """See `token_episodes.Library`."""

    retriever: OwnRetriever

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first."""
        searches = [DocumentSearch(s.query, s.most, task.documents) for task, s in asked]
        return self.retriever.find(searches)

    def open(self, task: ToolTask, step: Open) -> Document | None:
        """The question's document of this id; None if there is none."""
        return next((each for each in task.documents if each.id == step.doc_id), None)

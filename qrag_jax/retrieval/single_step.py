"""Search in one step: each question is one search of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from qrag_jax.retrieval.boolean_search import BooleanIndex, parse_boolean
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.retrieval.protocol import Index, Queries, Where, found


class QuestionEncoder(Protocol):
    """What makes vectors of questions for an engine that compares vectors."""

    title_separator: str  # of the passages' titles, see `retriever_config.passage_text`

    def cut(self, questions: Sequence[str]) -> list[int]:
        """The indices of the questions that are too long for it."""

    def __call__(self, questions: Sequence[str]) -> np.ndarray:
        """float32 `[questions, width]`; questions that are too long are cut."""


class SingleStepSearch:
    """Searches an index once for each question.

    Args:
        index: the engine.
        encoder: of questions; None: the engine compares words.
    """

    def __init__(self, index: Index, encoder: QuestionEncoder | None = None) -> None:
        self.index, self.encoder = index, encoder

    def check(self, question: str) -> None:
        """Refuses a question that the engine cannot read, for which a search would find nothing."""
        if isinstance(self.index, BooleanIndex):
            parse_boolean(question)

    def search(
        self, questions: Sequence[str], k: int, where: Where | None = None
    ) -> list[list[Hit]]:
        """The k best passages of each question, best first; each has the step 1."""
        vectors = self.encoder(questions) if self.encoder else None
        hits = self.index.search(Queries(list(questions), vectors), k, where)
        return [self._hits(*found(hits, query)) for query in range(len(questions))]

    def _hits(self, numbers: np.ndarray, scores: np.ndarray) -> list[Hit]:
        pairs = zip(self.index.corpus.passages(numbers), scores, strict=True)
        return [Hit(1, float(score), p.name, p.title, p.text, p.metadata) for p, score in pairs]

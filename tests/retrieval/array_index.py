"""An engine in a few lines of NumPy, over passages in memory: what others are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import NONE, Hits, Passage, Queries, Where


class ListedCorpus:
    """Passages in memory."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = list(passages)
        self.digest = "listed"

    def __len__(self) -> int:
        return len(self._passages)

    def passages(self, numbers: Sequence[int] | np.ndarray) -> list[Passage]:
        return [self._passages[int(number)] for number in numbers]

    def matching(self, where: Where) -> np.ndarray:
        for field in where:
            if not any(field in passage.metadata for passage in self._passages):
                raise InputError(f"no passage has the field {field}.")
        return np.array(
            [
                all(passage.metadata.get(field) == value for field, value in where.items())
                for passage in self._passages
            ]
        )


class ArrayIndex:
    """All scores at once, sorted."""

    def __init__(self, corpus: ListedCorpus, vectors: np.ndarray) -> None:
        self.corpus, self._vectors = corpus, vectors

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        assert queries.vectors is not None
        # Summed finely and rounded, so that equal vectors have equal scores.
        scores = queries.vectors.astype(np.float64) @ self._vectors.astype(np.float64).T
        scores = scores.astype(np.float32)
        numbers = np.broadcast_to(np.arange(len(self._vectors)), scores.shape)
        if where is not None:
            scores = np.where(self.corpus.matching(where)[None], scores, -np.inf)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(scores, order, 1)
        numbers = np.where(scores == -np.inf, NONE, np.take_along_axis(numbers, order, 1))
        short = ((0, 0), (0, k - scores.shape[1]))
        return Hits(
            np.pad(numbers, short, constant_values=NONE),
            np.pad(scores, short, constant_values=-np.inf),
        )

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._vectors[np.asarray(numbers)]


def of_texts(texts: Sequence[str], vectors: np.ndarray) -> ArrayIndex:
    """An index whose passages have the metadata `even`: whether their number is."""
    passages = [
        Passage(f"p{number}", text, metadata={"even": number % 2 == 0})
        for number, text in enumerate(texts)
    ]
    return ArrayIndex(ListedCorpus(passages), vectors)

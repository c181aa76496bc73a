"""Passages in memory, and an engine over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Passage, Where
from qrag_jax.retrieval.vectors import ScanIndex


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


def of_texts(texts: Sequence[str], vectors: np.ndarray) -> ScanIndex:
    """An index whose passages have the metadata `even`: whether their number is."""
    passages = [
        Passage(f"p{number}", text, metadata={"even": number % 2 == 0})
        for number, text in enumerate(texts)
    ]
    return ScanIndex(ListedCorpus(passages), vectors)

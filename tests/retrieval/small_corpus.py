"""Small stored corpora, and an engine whose hits a test gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import Corpus, Hits, Passage, Queries, Where
from qrag_jax.retrieval.ranking import Row, as_hits, best


def stored(folder: Path, texts: Sequence[str], **metadata: Sequence[Any]) -> StoredCorpus:
    """Passages p0, p1 and so on, with the values of every field of the metadata."""
    return write_corpus(
        folder,
        (
            Passage(f"p{i}", text, "", {name: values[i] for name, values in metadata.items()})
            for i, text in enumerate(texts)
        ),
    )


@dataclasses.dataclass
class TableIndex:
    """A real engine that looks its scores up: query → passage → score; others are no hits."""

    corpus: Corpus
    table: Mapping[str, Mapping[int, float]]

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        allowed = self.corpus.matching(where) if where else np.ones(len(self.corpus), bool)
        rows = []
        for text in queries.texts:
            scores = {n: s for n, s in self.table.get(text, {}).items() if allowed[n]}
            numbers = np.array(list(scores), np.int64)
            rows.append(best(numbers, np.array(list(scores.values()), np.float64), k))
        return as_hits([Row(*row) for row in rows], k)

"""Ranks anew, by a scorer of single pairs, what a first engine found or what a question brings.

A scorer may fail, for example where a server does not answer. The query then keeps the order that
it had, is marked, and is counted; the search goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Corpus, Hits, Index, Queries, Where
from qrag_jax.retrieval.ranking import Row, as_hits, best, check_k, found
from qrag_jax.retrieval.scorers import Scorer


class Reranked(NamedTuple):
    """Hits in the scorer's order.

    Attributes:
        hits: by the scorer's scores; of equal scores, the lowest numbers first.
        failed: bool `[queries]`: the scorer had no scores, or one that is not finite; the hits and
            scores are those of before.
    """

    hits: Hits
    failed: np.ndarray


class RerankedIndex:
    """An engine whose first hits are ranked anew; see `protocol.Index`. Threads may share it.

    Args:
        engine: finds the passages.
        scorer: orders them, by the query's text and the passages' title and text.
        depth: hits of the engine that are scored; a search gives no others, also if k is larger.

    Attributes:
        scored: queries so far whose hits were scored.
        kept: queries so far that kept the engine's order, because scoring failed.

    Raises:
        InputError: `depth` is below 1.
    """

    def __init__(self, engine: Index, scorer: Scorer, depth: int = 100) -> None:
        if depth < 1:
            raise InputError(f"config.rerank.depth is {depth}; it must be at least 1.")
        self.engine, self._scorer, self.depth = engine, scorer, depth
        self.corpus: Corpus = engine.corpus
        self.scored = self.kept = 0
        self._lock = threading.Lock()

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k best of the engine's first `depth` hits, by the scorer.

        Raises:
            InputError: k is below 1, or as the engine's search does.
        """
        return self.search_marked(queries, k, where).hits

    def search_marked(self, queries: Queries, k: int, where: Where | None = None) -> Reranked:
        """The same, and which queries kept the engine's order.

        Raises:
            InputError: k is below 1, or as the engine's search does.
        """
        check_k(k)
        first = self.engine.search(queries, self.depth, where)
        rows = [found(first, query) for query in range(len(queries))]
        texts = [[each.whole for each in self.corpus.passages(row.numbers)] for row in rows]
        reranked = _reranked(self._scorer, queries.texts, rows, texts, k)
        with self._lock:
            self.kept += int(reranked.failed.sum())
            self.scored += int((~reranked.failed).sum())
        return reranked

    def save(self, folder: Path) -> None:
        """Saves the first engine, which opens the folder again; a scorer is not part of an index.

        Raises:
            InputError, OSError: as the engine's `save` does.
        """
        self.engine.save(folder)


def rerank_documents(
    scorer: Scorer, queries: Sequence[str], documents: Sequence[Sequence[str]], k: int
) -> Reranked:
    """Ranks each question's own documents.

    Args:
        queries: the questions.
        documents: the texts that come with each question; there may be none.
        k: at least 1.

    Returns:
        The numbers are places in the question's own list. Where the scorer failed, the documents
        keep their order, with scores of 0.

    Raises:
        InputError: k is below 1.
    """
    check_k(k)
    rows = [
        Row(np.arange(len(texts), dtype=np.int64), np.zeros(len(texts), np.float32))
        for texts in documents
    ]
    return _reranked(scorer, queries, rows, documents, k)


def _reranked(
    scorer: Scorer,
    queries: Sequence[str],
    rows: Sequence[Row],
    texts: Sequence[Sequence[str]],
    k: int,
) -> Reranked:
    failed = np.zeros(len(queries), bool)
    ranked = []
    for query, (row, scores) in enumerate(zip(rows, scorer.scores(queries, texts), strict=True)):
        if scores is not None and len(scores) != len(row.numbers):
            raise ValueError(f"{len(row.numbers)} passages have {len(scores)} scores")
        if scores is None or not np.isfinite(scores).all():
            failed[query] = True
            ranked.append(Row(row.numbers[:k], row.scores[:k]))
        else:
            ranked.append(best(row.numbers, scores, k))
    return Reranked(as_hits(ranked, k), failed)

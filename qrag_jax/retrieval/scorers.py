"""What scores texts for a query one by one, vectors or a model server, and the ranking by it.

A scorer may fail, for example where a server does not answer. The query's documents then keep
their order, and the query is marked; the search goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from qrag_jax.llm.client import Client
from qrag_jax.llm.outcomes import Answer, RerankRequest
from qrag_jax.retrieval.protocol import Hits
from qrag_jax.retrieval.ranking import Row, as_hits, best, check_k

# Texts → float `[texts, width]`.
Embed = Callable[[Sequence[str]], np.ndarray]


class Scorer(Protocol):
    """Scores pairs of a query and a passage."""

    def scores(
        self, queries: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        """For each query, the scores of its own passages, float `[passages]`, higher is better.

        None for a query whose scores could not be had; this is no error.
        """


class EmbeddingScorer:
    """Inner products of vectors.

    Args:
        queries, passages: embed texts; called once for all of a call's different texts.
    """

    def __init__(self, queries: Embed, passages: Embed) -> None:
        self._queries, self._passages = queries, passages

    def scores(
        self, queries: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        """See `Scorer`; never None.

        Raises:
            ValueError: an embedding function does not give one vector for each text.
        """
        places = {text: at for at, text in enumerate(dict.fromkeys(t for p in passages for t in p))}
        if not places:
            return [np.zeros(0, np.float32) for _ in queries]
        of_passages = _vectors(self._passages, list(places))
        of_queries = _vectors(self._queries, queries)
        found: list[np.ndarray | None] = []
        for vector, texts in zip(of_queries, passages, strict=True):
            # A product may round otherwise in another row: equal texts share theirs, and tie.
            rows, row_of = np.unique([places[text] for text in texts], return_inverse=True)
            found.append((of_passages[rows.astype(np.int64)] @ vector)[row_of])
        return found


class EndpointScorer:
    """A cross-encoder behind `/rerank`, as vLLM, Cohere and Jina serve one.

    One request a query, with all its passages. The client tries again as its settings say; what
    then has no answer is None, and counted by cause in `client.counters()`. Give the client a
    `wait_limit`: without one, it waits for a server that is down for as long as it takes.

    Args:
        client: to the server; closed by whoever made it.
        extra: further fields of every request; see `RerankRequest`.
    """

    def __init__(self, client: Client, extra: Mapping[str, Any] | None = None) -> None:
        self._client, self._extra = client, dict(extra or {})

    def scores(
        self, queries: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        """See `Scorer`."""
        found: list[np.ndarray | None] = [np.zeros(0, np.float32) for _ in queries]
        asked = [at for at, texts in enumerate(passages) if texts]
        outcomes = self._client.ask_blocking(
            [RerankRequest(queries[at], tuple(passages[at]), extra=self._extra) for at in asked]
        )
        for at, outcome in zip(asked, outcomes, strict=True):
            found[at] = (
                np.array(json.loads(outcome.text), np.float32)
                if isinstance(outcome, Answer)
                else None
            )
        return found


class Reranked(NamedTuple):
    """Hits in the scorer's order.

    Attributes:
        hits: by the scorer's scores; of equal scores, the lowest numbers first.
        failed: bool `[queries]`: the scorer had no scores, or one that is not finite; the hits and
            scores are those of before.
    """

    hits: Hits
    failed: np.ndarray


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
    """
    check_k(k)
    failed = np.zeros(len(queries), bool)
    ranked = []
    for query, (texts, scores) in enumerate(
        zip(documents, scorer.scores(queries, documents), strict=True)
    ):
        numbers = np.arange(len(texts), dtype=np.int64)
        if scores is not None and len(scores) != len(texts):
            raise ValueError(f"{len(texts)} passages have {len(scores)} scores")
        if scores is None or not np.isfinite(scores).all():
            failed[query] = True
            ranked.append(Row(numbers[:k], np.zeros(len(numbers[:k]), np.float32)))
        else:
            ranked.append(best(numbers, scores, k))
    return Reranked(as_hits(ranked, k), failed)


def _vectors(embed: Embed, texts: Sequence[str]) -> np.ndarray:
    vectors = np.asarray(embed(texts), np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise ValueError(f"{len(texts)} texts were embedded as an array of shape {vectors.shape}")
    return vectors

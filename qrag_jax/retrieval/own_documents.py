"""Searches among the documents that a question brings along, about twenty, instead of a corpus.

| name | gives |
|---|---|
| `golden` | all supporting documents, whatever the query and the number wanted are |
| `bm25`, `lexical` | the best by BM25; those with none of the query's words are not given |
| `semantic` | the best by a scorer of pairs: an encoder, a rerank service |
| `hybrid` | both rankings, by reciprocal rank fusion (`protocol.fused`) |
| `interleaved` | RLVR's hybrid: the first ⌊k/2⌋+1 semantic ones, then as many by BM25, k of them |

`interleaved` is there to compare with RLVR. Where k is 1 or 2, it gives nothing of BM25.

Documents are any objects with the attributes `text` and `is_supporting`. A retriever answers many
searches at once, so that a scorer gets its pairs in batches.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Answer, Failure, RerankRequest
from qrag_jax.retrieval.bm25 import BM25Config, Words, best_by_words, weights_of
from qrag_jax.retrieval.index_folder import BM25, HYBRID
from qrag_jax.retrieval.protocol import DEPTH, Hits, best, fused

if TYPE_CHECKING:  # launch/musique_multihop has no library for requests
    from qrag_jax.llm.client import Client

GOLDEN, LEXICAL, SEMANTIC, INTERLEAVED = "golden", "lexical", "semantic", "interleaved"
RETRIEVERS = (GOLDEN, BM25, LEXICAL, SEMANTIC, HYBRID, INTERLEAVED)
_SCORED = (SEMANTIC, HYBRID, INTERLEAVED)
# Kept at most: BM25 of questions, about 50 kB each, and vectors of texts.
KEPT_QUESTIONS, KEPT_TEXTS = 4096, 2**16

# Texts → float `[texts, width]`.
Embed = Callable[[Sequence[str]], np.ndarray]
# (queries, the documents of each) → the scores of each query's documents, float `[documents]`,
# higher is better; None for a query whose scores could not be had, which is no error.
Scorer = Callable[[Sequence[str], Sequence[Sequence[str]]], list[np.ndarray | None]]


class OwnRetriever:
    """Searches each question's own documents by one of `RETRIEVERS`. Several threads may share it.

    Only `semantic`, `hybrid` and `interleaved` use the scorer.
    """

    def __init__(self, name: str, scorer: Scorer | None = None) -> None:
        if name not in RETRIEVERS:
            raise InputError(f"the retriever is {name!r}; use one of {', '.join(RETRIEVERS)}.")
        if name in _SCORED and scorer is None:
            raise InputError(f"retriever {name!r} needs an encoder or a rerank service; name one.")
        self._name, self._scorer, self._config = name, scorer, BM25Config()
        weigh = functools.partial(weights_of, config=self._config)
        self._weights: Any = functools.lru_cache(KEPT_QUESTIONS)(weigh)

    def find(
        self, searches: Sequence[tuple[str, int, tuple[Any, ...]]]
    ) -> list[tuple[Any, ...] | Failure]:
        """The documents of each search, best first; of equal ones, the first come first.

        A search is the query, how many documents are wanted, and the question's own. One that the
        scorer has no scores for is a `Failure`.
        """
        texts = [tuple(document.text for document in documents) for *_, documents in searches]
        scores: list[np.ndarray | None] = [None for _ in searches]
        if self._name in _SCORED and searches:
            assert self._scorer is not None
            scores = self._scorer([query for query, *_ in searches], texts)
        outcomes: list[tuple[Any, ...] | Failure] = []
        for (query, most, documents), contents, scored in zip(searches, texts, scores, strict=True):
            if self._name == GOLDEN:
                outcomes.append(tuple(document for document in documents if document.is_supporting))
            elif self._name in _SCORED and (scored is None or not np.isfinite(scored).all()):
                why = f"there are no scores of the {len(contents)} documents for {query!r}."
                outcomes.append(Failure("server", why))
            else:
                places = self._places(query, most, contents, scored)[:most]
                outcomes.append(tuple(documents[place] for place in places))
        return outcomes

    def _places(
        self, query: str, most: int, texts: tuple[str, ...], scores: np.ndarray | None
    ) -> list[int]:
        def by_words(k: int) -> Hits:
            return best_by_words(self._weights(texts), Words(self._config)(query), k)

        if scores is None:
            return by_words(most).numbers.tolist()
        scored = best(np.arange(len(texts)), scores, max(len(texts), 1))
        if self._name == SEMANTIC:
            return scored.numbers.tolist()
        if self._name == INTERLEAVED:
            part = most // 2 + 1
            both = [*scored.numbers[:part].tolist(), *by_words(part).numbers.tolist()]
            return list(dict.fromkeys(both))
        scored = Hits(scored.numbers[:DEPTH], scored.scores[:DEPTH])
        return best(*fused([by_words(DEPTH), scored]), most).numbers.tolist()


class EmbeddingScorer:
    """A `Scorer` by inner products of vectors; those of documents are kept.

    The embedders are called once for all of a call's different texts.
    """

    def __init__(self, queries: Embed, documents: Embed) -> None:
        self._queries, self._documents = queries, documents
        self._kept: dict[str, np.ndarray] = {}

    def __call__(
        self, queries: Sequence[str], documents: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        texts = dict.fromkeys(itertools.chain.from_iterable(documents))
        places = {text: place for place, text in enumerate(texts)}
        if not places:
            return [np.zeros(0, np.float32) for _ in queries]
        of_documents = self._vectors(list(places))
        of_queries = np.asarray(self._queries(queries), np.float32)
        scores: list[np.ndarray | None] = []
        for vector, contents in zip(of_queries, documents, strict=True):
            # A product may round otherwise in another row: equal texts share theirs, and tie.
            rows, row_of = np.unique([places[text] for text in contents], return_inverse=True)
            scores.append((of_documents[rows.astype(np.int64)] @ vector)[row_of])
        return scores

    def _vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 `[texts, width]`; different texts."""
        kept = self._kept  # nothing leaves it: another thread may only begin a new one
        if new := [text for text in texts if text not in kept]:
            kept.update(zip(new, np.asarray(self._documents(new), np.float32), strict=True))
        if len(kept) > KEPT_TEXTS:
            self._kept = {}
        return np.stack([kept[text] for text in texts])


def endpoint_scorer(client: Client) -> Scorer:
    """A cross-encoder behind `/rerank`, as vLLM, Cohere and Jina serve one, as a `Scorer`.

    One request a query, with all its documents. The client tries again as its settings say; what
    then has no answer is None. Give it a `wait_limit`: else it waits for a server that is down for
    as long as it takes.
    """

    def score(
        queries: Sequence[str], documents: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        pairs = [(q, tuple(texts)) for q, texts in zip(queries, documents, strict=True) if texts]
        outcomes = iter(client.ask_blocking([RerankRequest(*pair) for pair in pairs]))
        scores: list[np.ndarray | None] = []
        for texts in documents:
            outcome = next(outcomes) if texts else Answer("[]")
            values = json.loads(outcome.text) if isinstance(outcome, Answer) else None
            scores.append(None if values is None else np.array(values, np.float32))
        return scores

    return score

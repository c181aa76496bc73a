"""Searches among the documents that a question brings along, about twenty, instead of a corpus.

| name | gives |
|---|---|
| `golden` | all supporting documents, whatever the query and the number wanted are |
| `bm25`, `lexical` | the best by BM25; those with none of the query's words are not given |
| `semantic` | the best by a scorer of pairs: an encoder, a rerank service |
| `hybrid` | both rankings, by reciprocal rank fusion (`retrieval.hybrid`) |
| `interleaved` | RLVR's hybrid: the first ⌊k/2⌋+1 semantic ones, then as many by BM25, k of them |

`interleaved` is there to compare with RLVR. Where k is 1 or 2, it gives nothing of BM25.

Documents are any objects with the attributes `text` and `is_supporting`. A retriever answers many
searches at once, so that a scorer gets its pairs in batches.
"""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index, Words
from qrag_jax.retrieval.hybrid import FusionConfig, fused
from qrag_jax.retrieval.opening import BM25, HYBRID
from qrag_jax.retrieval.protocol import Hits, Passage, Queries, Where
from qrag_jax.retrieval.ranking import Row, best, check_k, found
from qrag_jax.retrieval.scorers import Embed, Scorer, rerank_documents

GOLDEN, LEXICAL, SEMANTIC, INTERLEAVED = "golden", "lexical", "semantic", "interleaved"
RETRIEVERS = (GOLDEN, BM25, LEXICAL, SEMANTIC, HYBRID, INTERLEAVED)
_SCORED = (SEMANTIC, HYBRID, INTERLEAVED)
KEPT_QUESTIONS, KEPT_TEXTS = 4096, 2**16


class OwnDocument(Protocol):
    """A document that belongs to a question."""

    @property
    def text(self) -> str:
        """What is searched."""

    @property
    def is_supporting(self) -> bool:
        """Whether the question needs it."""


D = TypeVar("D", bound=OwnDocument)


class Wanted(NamedTuple, Generic[D]):
    """One search."""

    query: str
    most: int  # documents wanted, at least 1
    documents: tuple[D, ...]  # the question's own; there may be none


class OwnRetriever(Protocol):
    """Searches each question's own documents. Several threads may share it."""

    def find(self, wanted: Sequence[Wanted[D]]) -> list[tuple[D, ...] | Failure]:
        """The documents of each search, best first; of equal ones, the first come first."""


def own_retriever(
    name: str,
    scorer: Scorer | None = None,
    *,
    bm25: BM25Config | None = None,
    fusion: FusionConfig | None = None,
) -> OwnRetriever:
    """The retriever of this name.

    Args:
        name: one of `RETRIEVERS`.
        scorer: of `semantic`, `hybrid` and `interleaved`; others do not use it.
        bm25: how words are found and weighed.
        fusion: of `hybrid`; its weights, if any, are BM25's and the scorer's.
    """
    if name not in RETRIEVERS:
        raise InputError(f"config.tools.retriever is {name!r}; use one of {', '.join(RETRIEVERS)}.")
    if name == GOLDEN:
        return Golden()
    if name in _SCORED and scorer is None:
        raise InputError(
            f"the retriever {name!r} needs something that scores documents; name an encoder or a "
            "rerank service, or use bm25."
        )
    if name == SEMANTIC:
        assert scorer is not None
        return Semantic(scorer)
    words = WordIndexes(bm25)
    if name in (BM25, LEXICAL):
        return Lexical(words)
    assert scorer is not None
    return Hybrid(words, scorer, fusion) if name == HYBRID else Interleaved(words, scorer)


class Golden:
    """Knows what is needed: a bound from above."""

    def find(self, wanted: Sequence[Wanted[D]]) -> list[tuple[D, ...] | Failure]:
        """All supporting documents in their order; see `OwnRetriever`."""
        _check(wanted)
        return [tuple(each for each in one.documents if each.is_supporting) for one in wanted]


class WordIndexes:
    """A BM25 index for each question's documents, built once and kept.

    Args:
        config: how words are found and weighed.
        keep: questions whose indexes are kept, those used last; about 50 kB each.
    """

    def __init__(self, config: BM25Config | None = None, keep: int = KEPT_QUESTIONS) -> None:
        self._config, self._keep = config or BM25Config(), keep
        self._kept: collections.OrderedDict[tuple[str, ...], BM25Index] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def of(self, texts: tuple[str, ...]) -> BM25Index | None:
        """The index of these documents; None if they have no word for one."""
        with self._lock:
            if texts in self._kept:
                self._kept.move_to_end(texts)
                return self._kept[texts]
        if not any(map(Words(self._config), texts)):
            return None
        index = BM25Index.build(_Texts(texts), self._config)
        with self._lock:
            self._kept[texts] = index
            while len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        return index

    def places(self, query: str, texts: tuple[str, ...], k: int) -> list[int]:
        """The places of the k best documents; those that score 0 are not among them."""
        index = self.of(texts)
        return _places(index.search(Queries([query]), k)) if index else []


class Lexical:
    """BM25 over the documents' texts."""

    def __init__(self, words: WordIndexes) -> None:
        self._words = words

    def find(self, wanted: Sequence[Wanted[D]]) -> list[tuple[D, ...] | Failure]:
        """See `OwnRetriever`."""
        _check(wanted)
        return [
            _picked(one, self._words.places(one.query, _texts(one), one.most)) for one in wanted
        ]


class Semantic:
    """The scorer's order."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def find(self, wanted: Sequence[Wanted[D]]) -> list[tuple[D, ...] | Failure]:
        """See `OwnRetriever`; a search that the scorer has no scores for is a `Failure`."""
        return _ranked(self._scorer, wanted, lambda one, row: row.numbers.tolist())


class Hybrid:
    """Reciprocal rank fusion of BM25's ranking and the scorer's."""

    def __init__(
        self, words: WordIndexes, scorer: Scorer, fusion: FusionConfig | None = None
    ) -> None:
        self._words, self._scorer, self._fusion = words, scorer, fusion or FusionConfig()

    def find(self, wanted: Sequence[Wanted[D]]) -> list[tuple[D, ...] | Failure]:
        """See `OwnRetriever`; a search that the scorer has no scores for is a `Failure`."""
        return _ranked(self._scorer, wanted, self._order)

    def _order(self, one: Wanted, row: Row) -> list[int]:
        index = self._words.of(_texts(one))
        if index is None:
            return row.numbers.tolist()
        depth = self._fusion.depth
        words = found(index.search(Queries([one.query]), depth), 0)
        both = [words, best(row.numbers, row.scores, depth)]
        return best(*fused(both, self._fusion), one.most).numbers.tolist()


class Interleaved:
    """RLVR's hybrid: parts of two lists, one behind the other."""

    def __init__(self, words: WordIndexes, scorer: Scorer) -> None:
        self._words, self._scorer = words, scorer

    def find(self, wanted: Sequence[Wanted[D]]) -> list[tuple[D, ...] | Failure]:
        """See `OwnRetriever`; a search that the scorer has no scores for is a `Failure`."""
        return _ranked(self._scorer, wanted, self._order)

    def _order(self, one: Wanted, row: Row) -> list[int]:
        part = one.most // 2 + 1
        lexical = self._words.places(one.query, _texts(one), part)
        return list(dict.fromkeys([*row.numbers[:part].tolist(), *lexical]))


class KeptVectors:
    """An embedding function that embeds each text once: `scorers.EmbeddingScorer`'s for passages.

    The encoder must not change while it is in use.

    Args:
        embed: texts → float `[texts, width]`.
        keep: texts whose vectors are kept, those used last.
    """

    def __init__(self, embed: Embed, keep: int = KEPT_TEXTS) -> None:
        self._embed, self._keep = embed, keep
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """float32 `[texts, width]`.

        Raises:
            ValueError: the function does not give one vector for each text.
        """
        with self._lock:
            vectors = {text: self._kept[text] for text in texts if text in self._kept}
        if new := [text for text in dict.fromkeys(texts) if text not in vectors]:
            vectors |= zip(new, np.asarray(self._embed(new), np.float32), strict=True)
        with self._lock:
            for text in vectors:
                self._kept[text] = vectors[text]
                self._kept.move_to_end(text)
            while len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        return np.stack([vectors[text] for text in texts])


class _Texts:
    """A question's documents as a `protocol.Corpus`."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self.digest = hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()

    def __len__(self) -> int:
        return len(self._texts)

    def passages(self, numbers: Sequence[int] | np.ndarray) -> list[Passage]:
        return [Passage(str(number), self._texts[int(number)]) for number in numbers]

    def matching(self, where: Where) -> np.ndarray:
        raise InputError(f"a question's own documents have no field {', '.join(where)}.")


def _ranked(
    scorer: Scorer, wanted: Sequence[Wanted[D]], order: Callable[[Wanted, Row], list[int]]
) -> list[tuple[D, ...] | Failure]:
    """What each search gives if `order` has its documents' places, from the scorer's ranking."""
    _check(wanted)
    if not wanted:
        return []
    texts, queries = [_texts(one) for one in wanted], [one.query for one in wanted]
    longest = max(1, *(len(each) for each in texts))
    hits, failed = rerank_documents(scorer, queries, texts, longest)
    return [
        _no_scores(one)
        if failed[at]
        else _picked(one, order(one, found(hits, at)) if one.documents else [])
        for at, one in enumerate(wanted)
    ]


def _no_scores(one: Wanted) -> Failure:
    return Failure(
        "server", f"there are no scores of the {len(one.documents)} documents for {one.query!r}."
    )


def _check(wanted: Sequence[Wanted]) -> None:
    for one in wanted:
        check_k(one.most)


def _texts(one: Wanted) -> tuple[str, ...]:
    return tuple(document.text for document in one.documents)


def _places(hits: Hits) -> list[int]:
    return found(hits, 0).numbers.tolist()


def _picked(one: Wanted[D], places: Sequence[int]) -> tuple[D, ...]:
    return tuple(one.documents[place] for place in places[: one.most])

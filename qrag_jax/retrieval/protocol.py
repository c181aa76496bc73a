"""What every engine of search offers, what goes in and out, and how hits are ranked.

Inside, a passage is its number: its place in the corpus, from 0. Outside, it is its name, the id
that the corpus's own file gives it. Engines rank by score, and passages of equal scores by number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from qrag_jax.data.sample import Passage as Passage

if TYPE_CHECKING:
    from qrag_jax.retrieval.corpus import StoredCorpus

NONE = -1  # in the place of a passage's number: the corpus, or the filter, had no more passages

# Field of the passages' metadata → the value, or the values of which one will do.
Where = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Queries:
    """A batch of queries; an engine reads what it searches by."""

    texts: Sequence[str]  # for engines that compare words
    vectors: np.ndarray | None = None  # float32 `[queries, width]`, for those of vectors

    def __len__(self) -> int:
        return len(self.texts)


class Hits(NamedTuple):
    """The best passages of one query, or of each of several, best first.

    Of several queries, those with fewer than k passages have `NONE` with the score -inf behind.
    """

    numbers: np.ndarray  # int64 [k], or [queries, k]
    scores: np.ndarray  # float32, likewise


class Index(Protocol):
    """An engine with a corpus in it."""

    corpus: StoredCorpus

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest scores, of those whose metadata agree with `where`."""


class VectorIndex(Index, Protocol):
    """An engine that compares vectors, and gives them back."""

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the passages' vectors."""


# ---------------------------------------------------------------------- ranks


def best(numbers: np.ndarray, scores: np.ndarray, k: int) -> Hits:
    """The k highest scores, exactly: of those that tie with the k-th, the lowest numbers.

    Args:
        numbers: int `[n]`, each passage once, in any order.
        scores: float `[n]`, finite; scores tie that are equal in float32.
    """
    scores = scores.astype(np.float32, copy=False)
    if k < len(scores):
        # A partition alone would take any of those that tie with the k-th.
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        kept = np.flatnonzero(scores >= least)
        numbers, scores = numbers[kept], scores[kept]
    return row_of(ranked(numbers[None], scores[None], k), 0)


def as_hits(rows: Sequence[Hits], k: int) -> Hits:
    """Rows of at most k hits as arrays `[queries, k]`; the rest is `NONE` and -inf."""
    hits = Hits(
        np.full((len(rows), k), NONE, np.int64), np.full((len(rows), k), -np.inf, np.float32)
    )
    for query, row in enumerate(rows):
        hits.numbers[query, : len(row.numbers)] = row.numbers
        hits.scores[query, : len(row.scores)] = row.scores
    return hits


def row_of(hits: Hits, query: int) -> Hits:
    """The hits of one query, without the places that are `NONE`."""
    kept = hits.numbers[query] != NONE
    return Hits(hits.numbers[query][kept], hits.scores[query][kept])


def ranked(numbers: np.ndarray, scores: np.ndarray, k: int) -> Hits:
    """The rule of all ranks, for short rows: equal scores rank by number.

    Args:
        numbers: int `[queries, n]`, each once, or `NONE`.
    """
    numbers = np.asarray(numbers, np.int64)
    scores = np.where(numbers == NONE, -np.inf, scores).astype(np.float32)
    order = np.lexsort((numbers, -scores), axis=1)[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    numbers = np.where(scores == -np.inf, NONE, np.take_along_axis(numbers, order, axis=1))
    short = ((0, 0), (0, k - scores.shape[1]))
    return Hits(
        np.pad(numbers, short, constant_values=NONE), np.pad(scores, short, constant_values=-np.inf)
    )


def past_ties(search: Callable[[int], Hits], k: int, most: int) -> Hits:
    """The k best by an engine in whose hits those with equal scores come in any order.

    More than k are asked for until the score falls, `most` at the most, so that the lowest numbers
    of a tie are there. `search` gives so many hits of each query, best first.
    """
    asked = max(min(k + 1, most), 1)
    while True:
        numbers, scores = search(asked)
        tied = asked < most and (scores[:, -1] == scores[:, k - 1]) & (numbers[:, -1] != NONE)
        if not np.any(tied):
            return ranked(numbers, scores, k)
        asked = min(2 * asked, most)


DEPTH = 100  # hits that are fused of each ranking, whatever k is: so the first of many are the few
_CONSTANT = 60.0  # of Cormack, Clarke and Büttcher; the larger, the less the first ranks stand out


def fused(rows: Sequence[Hits]) -> Hits:
    """All passages of some rankings, in the order of their numbers, by reciprocal rank fusion.

    The score is the sum, over the rankings, of 1 / (60 + rank), the first rank being 1 (Cormack,
    Clarke and Büttcher, SIGIR 2009); float64.
    """
    numbers = np.unique(np.concatenate([row.numbers for row in rows]))
    parts = np.zeros((len(rows), len(numbers)))
    for part, row in zip(parts, rows, strict=True):
        ranks = np.arange(1, len(row.numbers) + 1)
        part[np.searchsorted(numbers, row.numbers)] = 1 / (_CONSTANT + ranks)
    # In order of size, so that the same parts in another order have the same sum.
    return Hits(numbers, np.sort(parts, axis=0).sum(axis=0))


class FusedIndex:
    """Vectors and words of one corpus as one engine, by the first `DEPTH` passages of either.

    weight: None: ranks are fused. Else a passage's score is that by vectors, plus the weight times
    that by words, of which the best of the query counts 1.
    """

    def __init__(
        self, by_vectors: VectorIndex, by_words: Index, weight: float | None = None
    ) -> None:
        self.corpus, self.vectors = by_vectors.corpus, by_vectors.vectors
        self._near, self._worded, self._weight = by_vectors, by_words, weight

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """With a filter, both engines rank only what agrees with it."""
        near, worded = (one.search(queries, DEPTH, where) for one in (self._near, self._worded))
        both = [(row_of(near, query), row_of(worded, query)) for query in range(len(queries))]
        if self._weight is None:
            return as_hits([best(*fused(rows), k) for rows in both], k)
        assert queries.vectors is not None
        numbers = np.unique(worded.numbers[worded.numbers != NONE])
        vectors, rows = self.vectors(numbers), []
        for query, (by_vectors, by_words) in zip(queries.vectors, both, strict=True):
            q = vectors[np.searchsorted(numbers, by_words.numbers)] @ query
            scores = dict(zip(by_words.numbers.tolist(), q.tolist(), strict=True))
            scores |= zip(by_vectors.numbers.tolist(), by_vectors.scores.tolist(), strict=True)
            for number, score in zip(by_words.numbers.tolist(), by_words.scores, strict=True):
                scores[number] += self._weight * score / by_words.scores[0]
            rows.append(best(np.array([*scores], np.int64), np.array([*scores.values()]), k))
        return as_hits(rows, k)


def padded_batch(count: int) -> int:
    """The batch of so many queries: 1, 8, or a further power of two; each is one program."""
    return 1 if count == 1 else max(8, 1 << (count - 1).bit_length())

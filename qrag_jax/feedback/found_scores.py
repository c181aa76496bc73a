"""Scores of what one query found, for rewards: trec_eval's numbers without its set-up.

A ranking is document ids, best first. With g(i) the relevance of the document at place i, 0 if it
is not judged, and k the places that count:

- `ndcg`: the sum of g(i) / log2(i + 1) over i ≤ k, over that sum of the best ranking (Järvelin and
  Kekäläinen, 2002);
- `recall`: share of the relevant documents that are among the first k;
- `reciprocal_rank`: 1 / place of the first relevant document; 0 if none is among the first k.

A document that is in the ranking twice counts at its first place, and takes its second place all
the same. Evaluation uses `metrics.ranking`, which is trec_eval itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

Grades = Mapping[str, int]  # document → relevance, at least 1


def ndcg(ranking: Sequence[str], grades: Grades, k: int) -> float:
    """nDCG@k of a ranking.

    Raises:
        ValueError: no document is relevant, or k is below 1.
    """
    _check(grades, k)
    best = sorted(grades.values(), reverse=True)
    return _discounted(_gains(ranking, grades, k)) / _discounted(best[:k])


def recall(ranking: Sequence[str], grades: Grades, k: int) -> float:
    """Recall@k of a ranking.

    Raises:
        ValueError: as for `ndcg`.
    """
    _check(grades, k)
    return len(grades.keys() & set(ranking[:k])) / len(grades)


def reciprocal_rank(ranking: Sequence[str], grades: Grades, k: int) -> float:
    """Reciprocal rank of a ranking that ends at place k.

    Raises:
        ValueError: as for `ndcg`.
    """
    _check(grades, k)
    return next((1 / place for place, each in _placed(ranking, k) if each in grades), 0.0)


def _placed(ranking: Sequence[str], k: int) -> Iterable[tuple[int, str]]:
    return enumerate(ranking[:k], 1)


def _gains(ranking: Sequence[str], grades: Grades, k: int) -> list[int]:
    left = dict(grades)
    return [left.pop(each, 0) for each in ranking[:k]]


def _discounted(gains: Sequence[int]) -> float:
    return math.fsum(gain / math.log2(place + 1) for place, gain in enumerate(gains, 1))


def _check(grades: Grades, k: int) -> None:
    if not grades or min(grades.values()) < 1:
        raise ValueError("a query has one relevant document at least, and each is of grade 1 on")
    if k < 1:
        raise ValueError(f"a ranking is scored to place 1 at least, not {k}")

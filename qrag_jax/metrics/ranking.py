"""Scores of rankings against judged documents, as trec_eval gives them; and of several searches.

A ranking is a list of document names, best first. Its order alone counts: equal scores are the
engine's matter. Judgements ("qrels") give each query the relevance of its judged documents; one of
1 or more is relevant, and others, as documents without a judgement, are not. A document that is in
a ranking twice counts at its first place, and takes its second place all the same.

The scores, all in [0, 1], are those of trec_eval (Voorhees and Harman, 2005):

- `recall@k`: share of the relevant documents among the first k;
- `hit@k`: 1 if a relevant document is among the first k;
- `rr`, `rr@k`: 1 / place of the first relevant document; 0 if there is none (among the first k);
- `ap`, `ap@k`: mean, over the relevant documents, of the precision at each one's place; 0 for
  those that are not found;
- `ndcg`, `ndcg@k`: discounted cumulated gain over that of the best ranking, the gain being the
  relevance and the discount 1 / log2(place + 1) (Järvelin and Kekäläinen, 2002).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from qrag_jax.errors import InputError, Rule
from qrag_jax.metrics.bootstrap import mean_interval

Grades = Mapping[str, int]  # document → relevance; one at least is 1 or more
Qrels = Mapping[str, Grades]  # by query
Rankings = Mapping[str, Iterable[str]]  # query → documents, best first

_NAME = re.compile(r"(?P<kind>(?:recall|hit)(?=@)|rr|ap|ndcg)(?:@(?P<k>[1-9][0-9]{0,5}))?")
NAMED = Rule(
    lambda names: all(map(_NAME.fullmatch, names)),
    "use recall@k, hit@k, or rr, ap or ndcg, perhaps with @k",
)


# The scores of a ranking that ends at place k; None: of all of it.


def recall(ranking: Sequence[str], grades: Grades, k: int | None = None) -> float:
    gains = _gains(ranking, grades, k)
    return sum(gain > 0 for gain in gains) / len(_relevant(grades))


def hit(ranking: Sequence[str], grades: Grades, k: int | None = None) -> float:
    return float(any(_gains(ranking, grades, k)))


def reciprocal_rank(ranking: Sequence[str], grades: Grades, k: int | None = None) -> float:
    gains = _gains(ranking, grades, k)
    return next((1 / place for place, gain in enumerate(gains, 1) if gain), 0.0)


def average_precision(ranking: Sequence[str], grades: Grades, k: int | None = None) -> float:
    places = [place for place, gain in enumerate(_gains(ranking, grades, k), 1) if gain]
    precisions = (count / place for count, place in enumerate(places, 1))
    return math.fsum(precisions) / len(_relevant(grades))


def ndcg(ranking: Sequence[str], grades: Grades, k: int | None = None) -> float:
    best = sorted(_relevant(grades).values(), reverse=True)
    return _discounted(_gains(ranking, grades, k)) / _discounted(best[:k])


def _relevant(grades: Grades) -> dict[str, int]:
    return {document: grade for document, grade in grades.items() if grade > 0}


def _gains(ranking: Sequence[str], grades: Grades, k: int | None) -> list[int]:
    left = _relevant(grades)
    return [left.pop(name, 0) for name in ranking[:k]]


def _discounted(gains: Sequence[int]) -> float:
    return math.fsum(gain / math.log2(place + 1) for place, gain in enumerate(gains, 1))


MEASURES: dict[str, Callable[[Sequence[str], Grades, int | None], float]] = {
    "recall": recall,
    "hit": hit,
    "rr": reciprocal_rank,
    "ap": average_precision,
    "ndcg": ndcg,
}


def ranking_columns(
    rankings: Rankings, qrels: Qrels, measures: Sequence[str]
) -> dict[str, dict[str, float]]:
    """measure → query, in the order of `qrels` → score, of every query with a relevant document.

    With one and no ranking, the score is 0.
    """
    cuts = {name: _parsed(name) for name in measures}
    judged = {query: grades for query, grades in qrels.items() if _relevant(grades)}
    if not judged:
        raise InputError("no query has a relevant document; give the judgements of these queries")
    ranked = {query: [*rankings.get(query, ())] for query in judged}
    return {
        name: {query: MEASURES[kind](ranked[query], judged[query], k) for query in judged}
        for name, (kind, k) in cuts.items()
    }


def score_hits(
    hits: Mapping[str, Iterable[Any]], qrels: Qrels, measures: Sequence[str]
) -> dict[str, tuple[float, float, float]]:
    """Mean of each measure over the queries with a relevant passage, and its 95 % interval.

    Args:
        hits: query → hits, best first, each with an `id`.
        qrels: of `data.corpora.read_qrels`; queries that were not searched for do not count.
        measures: such as "recall@4" and "ndcg@10".
    """
    judged = {query: grades for query, grades in qrels.items() if query in hits}
    ranked = {query: [hit.id for hit in listed] for query, listed in hits.items()}
    columns = ranking_columns(ranked, judged, measures)
    return {name: mean_interval([*column.values()]) for name, column in columns.items()}


def cut_of(name: str) -> int | None:
    """The k of a measure such as `ndcg@10`; None if it has none."""
    return _parsed(name)[1]


def _parsed(name: str) -> tuple[str, int | None]:
    if (match := _NAME.fullmatch(name)) is None:
        raise InputError(f"there is no measure {name!r}; {NAMED.wanted}")
    return match["kind"], int(match["k"]) if match["k"] else None


# ---------------------------------------------------------------------------- several searches

# `[hop][place]`: the names of the passages of each search, in the order in which they were read.
Found = Sequence[Sequence[str]]


def episode_recall(relevant: Collection[str], hops: Found) -> float:
    """Share of the gold passages that any hop found."""
    return recall(_ranking(hops), dict.fromkeys(relevant, 1))


def episode_ndcg(relevant: Collection[str], hops: Found) -> float:
    """nDCG of the episode's passages as one ranking; one that comes again takes no place."""
    return ndcg(_ranking(hops), dict.fromkeys(relevant, 1))


def hop_recall(relevant: Collection[str], hops: Found) -> tuple[float, ...]:
    """`[hop]`: share of the gold passages that this hop was the first to find.

    The sum over the hops is `episode_recall`, so that finding a passage again is worth nothing.
    """
    return tuple(len(new.intersection(relevant)) / len(set(relevant)) for new in _new(hops))


def hop_ndcg(relevant: Collection[str], hops: Found) -> tuple[float, ...]:
    """`[hop]`: nDCG of the hop's passages, where the gold passages of earlier hops do not count.

    A hop before which all gold passages were found has 0.
    """
    left, scores = set(relevant), []
    for names in hops:
        scores.append(episode_ndcg(left, [names]) if left else 0.0)
        left = left.difference(names)
    return tuple(scores)


def novelty(hops: Found) -> tuple[float, ...]:
    """`[hop]`: share of the hop's passages that no earlier hop found; 0 for a hop without any."""
    return tuple(
        len(new) / len(set(names)) if names else 0.0 for new, names in zip(_new(hops), hops)
    )


def _ranking(hops: Found) -> list[str]:
    return list(dict.fromkeys(name for names in hops for name in names))


def _new(hops: Found) -> list[set[str]]:
    """The passages that each hop was the first to find."""
    seen, new = set[str](), []
    for names in hops:
        new.append(set(names) - seen)
        seen.update(names)
    return new

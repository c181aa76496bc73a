"""Scores of rankings against judged documents, by trec_eval's own code (ir-measures, pytrec_eval).

A ranking is a list of document names, best first. Its order alone counts: equal scores are the
engine's matter. Judgements ("qrels") give each query the relevance of its judged documents; one of
1 or more is relevant, and others, as documents without a judgement, are not.

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

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics.facts import with_intervals

Qrels = Mapping[str, Mapping[str, int]]  # query → document → relevance
Rankings = Mapping[str, Iterable[str]]  # query → documents, best first

STANDARD = ("ndcg@10", "recall@100", "ap", "rr@10", "hit@10")
_NAME = re.compile(r"(?P<kind>recall|hit|rr|ap|ndcg)(@(?P<k>[1-9][0-9]{0,5}))?")
_NEEDS_K = ("recall", "hit")


def ranking_columns(
    rankings: Rankings, qrels: Qrels, measures: Sequence[str] = STANDARD
) -> dict[str, dict[str, float]]:
    """For each measure, the score of every query that has a relevant document.

    Queries without a relevant document have no scores: every ranking of theirs is as good as any
    other. A query with relevant documents that has no ranking, or an empty one, scores 0.
    Rankings of queries without judgements do not count.

    Args:
        rankings: the documents of each query, best first.
        qrels: relevance of the judged documents of each query.
        measures: names such as `ndcg@10`, see above.

    Returns:
        measure → query → score; the queries in the order of `qrels`.

    Raises:
        ValueError: a ranking holds a document twice.
    """
    cuts = {name: _parsed(name) for name in measures}
    judged = {
        query: dict(docs) for query, docs in qrels.items() if max(docs.values(), default=0) > 0
    }
    if not judged:
        raise InputError("no query has a relevant document; give the judgements of these queries")
    ranked = {query: _distinct(query, rankings.get(query, ())) for query in judged}
    columns: dict[str, dict[str, float]] = {}
    for name, (kind, k) in cuts.items():
        columns[name] = dict.fromkeys(judged, 0.0)
        # pytrec_eval has no cut for the reciprocal rank; a ranking that ends there is the same.
        most = k if kind == "rr" else None
        # Places as scores: trec_eval would order equal scores by the documents' names.
        run = {
            query: {document: -float(place) for place, document in enumerate(documents[:most])}
            for query, documents in ranked.items()
            if documents
        }
        for each in _provider().iter_calc([_measure(kind, k)], judged, run):
            columns[name][each.query_id] = float(each.value)
    return columns


def ranking_summary(
    rankings: Rankings, qrels: Qrels, measures: Sequence[str] = STANDARD
) -> dict[str, Any]:
    """Means over the queries with their 95% bootstrap intervals.

    Returns:
        For each measure {"mean", "low", "high"}; `queries`, the number that is scored;
        `without_relevant`, the judged queries left out because no document is relevant; and
        `without_hits`, the scored queries whose ranking is missing or empty.

    Raises:
        InputError, ValueError: as for `ranking_columns`.
    """
    columns = ranking_columns(rankings, qrels, measures)
    scored = next(iter(columns.values()), {})
    return {
        **with_intervals({name: list(values.values()) for name, values in columns.items()}),
        "queries": len(scored),
        "without_relevant": len(qrels) - len(scored),
        "without_hits": sum(not list(rankings.get(query, ())) for query in scored),
    }


def cut_of(name: str) -> int | None:
    """The k of a measure such as `ndcg@10`; None if it has none."""
    return _parsed(name)[1]


def _parsed(name: str) -> tuple[str, int | None]:
    found = _NAME.fullmatch(name)
    if found is None or (found["k"] is None and found["kind"] in _NEEDS_K):
        raise InputError(
            f"there is no measure {name!r} of rankings; use recall@k, hit@k, rr, rr@k, ap, ap@k, "
            "ndcg or ndcg@k, with a number for k"
        )
    return found["kind"], int(found["k"]) if found["k"] else None


def _distinct(query: str, documents: Iterable[str]) -> list[str]:
    listed = list(documents)
    if len(set(listed)) < len(listed):
        twice = next(each for place, each in enumerate(listed) if each in listed[:place])
        raise ValueError(f"the ranking of query {query!r} holds document {twice!r} twice")
    return listed


def _provider() -> Any:
    """Of all the packages behind ir-measures, the one that is trec_eval itself."""
    try:
        import ir_measures
    except ImportError:
        raise InputError(
            "scoring rankings needs the package ir-measures: run pip install 'qrag_jax[retrieval]'"
        ) from None
    return ir_measures.pytrec_eval


def _measure(kind: str, k: int | None) -> Any:
    import ir_measures

    kinds = {
        "recall": ir_measures.R,
        "hit": ir_measures.Success,
        "rr": ir_measures.RR,
        "ap": ir_measures.AP,
        "ndcg": ir_measures.nDCG,
    }
    return kinds[kind] if k is None or kind == "rr" else kinds[kind] @ k

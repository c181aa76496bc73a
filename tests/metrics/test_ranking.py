from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.ranking import STANDARD, ranking_columns, ranking_summary

# ---------------------------------------------------------------- the definitions, written slowly


def recall(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    relevant = {document for document, grade in judged.items() if grade >= 1}
    return len(relevant & set(ranking[:k])) / len(relevant)


def hit(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    return float(any(judged.get(document, 0) >= 1 for document in ranking[:k]))


def rr(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    for place, document in enumerate(ranking[:k], 1):
        if judged.get(document, 0) >= 1:
            return 1.0 / place
    return 0.0


def ap(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    found, total = 0, 0.0
    for place, document in enumerate(ranking[:k], 1):
        if judged.get(document, 0) >= 1:
            found += 1
            total += found / place
    return total / sum(grade >= 1 for grade in judged.values())


def ndcg(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    def gained(grades: Sequence[int]) -> float:
        return sum(max(g, 0) / math.log2(place + 1) for place, g in enumerate(grades[:k], 1))

    ideal = sorted(judged.values(), reverse=True)
    return gained([judged.get(document, 0) for document in ranking]) / gained(ideal)


DEFINED: dict[str, Callable[[Sequence[str], dict[str, int], int], float]] = {
    "recall": recall,
    "hit": hit,
    "rr": rr,
    "ap": ap,
    "ndcg": ndcg,
}


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_the_definitions(seed: int) -> None:
    """Random rankings, grades from -1 to 3, some rankings empty, some shorter than k."""
    draw = random.Random(seed)
    documents = [f"d{number}" for number in range(30)]
    qrels, rankings = {}, {}
    for number in range(25):
        judged = {d: draw.choice((-1, 0, 0, 1, 2, 3)) for d in draw.sample(documents, 9)}
        qrels[f"q{number}"] = judged | {"d0": 1}
        rankings[f"q{number}"] = draw.sample(documents, draw.choice((0, 1, 3, 20, 30)))
    for k in (1, 2, 3, 10, 100):
        names = [f"{kind}@{k}" for kind in DEFINED]
        columns = ranking_columns(rankings, qrels, names)
        for kind, name in zip(DEFINED, names):
            for query, judged in qrels.items():
                expected = DEFINED[kind](rankings[query], judged, k)
                assert columns[name][query] == pytest.approx(expected, abs=1e-6), (name, query)
    whole = ranking_columns(rankings, qrels, ("rr", "ap", "ndcg"))
    for name, column in whole.items():
        for query, score in column.items():
            expected = DEFINED[name](rankings[query], qrels[query], 10**6)
            assert score == pytest.approx(expected, abs=1e-6)


def test_the_order_counts_and_not_the_names() -> None:
    """trec_eval orders equal scores by name, descending; a ranking keeps its own order."""
    for ranking in (["a", "b"], ["b", "a"]):
        columns = ranking_columns({"q": ranking}, {"q": {"a": 1}}, ["rr"])
        assert columns["rr"] == {"q": 1.0 / (1 + ranking.index("a"))}


def test_a_query_without_relevant_documents_is_left_out_and_counted() -> None:
    qrels = {"nothing": {"a": 0, "b": -1}, "unjudged": {}, "found": {"a": 1}, "missed": {"a": 1}}
    rankings = {"nothing": ["a"], "unjudged": ["a"], "found": ["a"], "unknown": ["a"]}
    summary = ranking_summary(rankings, qrels)
    assert set(summary) == {*STANDARD, "queries", "without_relevant", "without_hits"}
    assert (summary["queries"], summary["without_relevant"]) == (2, 2)
    assert summary["without_hits"] == 1
    for name in STANDARD:
        assert summary[name]["mean"] == 0.5  # the query without a ranking has 0
        assert summary[name]["low"] < 0.5 < summary[name]["high"]
    with pytest.raises(InputError, match="relevant document"):
        ranking_columns(rankings, {"nothing": {"a": 0}})


def test_a_document_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="query 'q' holds"):
        ranking_columns({"q": ["a", "b", "c", "b"]}, {"q": {"a": 1}})


@pytest.mark.parametrize("name", ["map", "recall", "hit", "ndcg@0", "ndcg@-1", "ap@k", "RR@10", ""])
def test_unknown_measures_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="there is no measure"):
        ranking_columns({"q": ["a"]}, {"q": {"a": 1}}, [name])

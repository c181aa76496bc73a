"""Measures of rankings and of hops against trec_eval's code."""

from __future__ import annotations

import math
import random

import ir_measures
import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.ranking import (
    episode_ndcg,
    episode_recall,
    hop_ndcg,
    hop_recall,
    novelty,
    ranking_columns,
)

MEASURES = {
    "recall": ir_measures.R,
    "hit": ir_measures.Success,
    "ap": ir_measures.AP,
    "ndcg": ir_measures.nDCG,
}


def test_scores_are_those_of_trec_eval() -> None:
    """Random rankings, grades from -1 to 3, some rankings empty, some shorter than k."""
    draw = random.Random(0)
    documents = [f"d{number}" for number in range(30)]
    qrels, rankings = {}, {}
    for number in range(60):
        judged = {d: draw.choice((-1, 0, 0, 1, 2, 3)) for d in draw.sample(documents, 9)}
        qrels[f"q{number}"] = judged | {"d0": 1}
        rankings[f"q{number}"] = draw.sample(documents, draw.choice((0, 1, 3, 20, 30)))
    measures = {f"{n}@{k}": m @ k for n, m in MEASURES.items() for k in (1, 2, 3, 10, 100)}
    measures |= {"rr": ir_measures.RR, "ap": ir_measures.AP, "ndcg": ir_measures.nDCG}
    columns = ranking_columns(rankings, qrels, list(measures))
    run = {q: {d: -float(n) for n, d in enumerate(own)} for q, own in rankings.items() if own}
    for name, measure in measures.items():
        expected = dict.fromkeys(qrels, 0.0)
        for each in ir_measures.pytrec_eval.iter_calc([measure], qrels, run):
            expected[each.query_id] = each.value
        assert columns[name] == pytest.approx(expected, rel=0, abs=1e-9), name


def test_the_order_counts_and_not_the_names() -> None:
    """trec_eval orders equal scores by name, descending; a ranking keeps its own order."""
    for ranking in (["a", "b"], ["b", "a"]):
        columns = ranking_columns({"q": ranking}, {"q": {"a": 1}}, ["rr", "rr@1"])
        assert columns["rr"] == {"q": 1.0 / (1 + ranking.index("a"))}
        assert columns["rr@1"] == {"q": float(ranking[0] == "a")}
    for name in ("map", "recall", "ndcg@0", "ap@k", "RR@10", ""):
        with pytest.raises(InputError, match=f"'{name}'"):
            ranking_columns({"q": ["a"]}, {"q": {"a": 1}}, [name])


def test_a_query_without_relevant_documents_is_left_out() -> None:
    qrels = {"nothing": {"a": 0, "b": -1}, "unjudged": {}, "found": {"a": 1}, "missed": {"a": 1}}
    rankings = {"nothing": ["a"], "unjudged": ["a"], "found": ["a"], "unknown": ["a"]}
    columns = ranking_columns(rankings, qrels, ["ndcg@10", "recall@100", "ap"])
    for column in columns.values():
        assert column == {"found": 1.0, "missed": 0.0}  # the query without a ranking has 0
    with pytest.raises(InputError, match="relevant document"):
        ranking_columns(rankings, {"nothing": {"a": 0}}, ["ap"])


def test_several_searches_by_hand() -> None:
    gold, found = {"a", "d", "x"}, [["a", "b", "c"], ["a", "d", "b"], [], ["d", "e", "f"]]
    ideal_3, ideal_2 = 1 + 1 / math.log2(3) + 1 / 2, 1 + 1 / math.log2(3)
    assert episode_recall(gold, found) == 2 / 3
    assert episode_ndcg(gold, found) == pytest.approx((1 + 1 / math.log2(5)) / ideal_3)
    assert episode_recall(gold, []) == episode_ndcg(gold, []) == episode_recall({"x"}, found) == 0
    assert hop_recall(gold, found) == (1 / 3, 1 / 3, 0, 0)
    assert novelty(found) == (1, 1 / 3, 0, 2 / 3)
    assert hop_ndcg(gold, found) == pytest.approx((1 / ideal_3, (1 / math.log2(3)) / ideal_2, 0, 0))
    # A passage that one search returns twice counts once, and takes one place.
    assert hop_ndcg({"a", "b"}, [["a", "a", "b"]]) == (1,)
    # Nothing is left to find after the first hop.
    assert hop_ndcg({"a"}, found) == (1, 0, 0, 0)
    assert hop_recall(gold, []) == novelty([]) == hop_ndcg(gold, []) == ()

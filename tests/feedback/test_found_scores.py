"""Scores of what a query found: trec_eval's numbers."""

from __future__ import annotations

import math
import random

import pytest

from qrag_jax.feedback.found_scores import (
    ndcg,
    recall,
    reciprocal_rank,
)
from qrag_jax.metrics.ranking import ranking_columns

GRADES = {"a": 3, "b": 1, "c": 2}


def test_scores_by_hand() -> None:
    """Relevant documents at the places 2 and 4; the first three of the best are 3, 2, 1."""
    ranking = ["x", "b", "y", "a", "z"]
    best = 3 + 2 / math.log2(3) + 1 / 2
    assert ndcg(ranking, GRADES, 5) == pytest.approx((1 / math.log2(3) + 3 / math.log2(5)) / best)
    assert ndcg(ranking, GRADES, 2) == pytest.approx(1 / math.log2(3) / (3 + 2 / math.log2(3)))
    assert recall(ranking, GRADES, 5) == pytest.approx(2 / 3)
    assert recall(ranking, GRADES, 3) == pytest.approx(1 / 3)
    assert reciprocal_rank(ranking, GRADES, 5) == 1 / 2
    assert reciprocal_rank(ranking, GRADES, 1) == 0.0
    assert ndcg(["a", "c", "b"], GRADES, 3) == 1.0


@pytest.mark.parametrize("k", [1, 2, 5, 10, 100])
def test_scores_are_trec_evals(k: int) -> None:
    draw = random.Random(k)
    documents = [f"d{number}" for number in range(30)]
    qrels, rankings = {}, {}
    for number in range(80):
        relevant = draw.sample(documents, draw.randint(1, 12))
        qrels[f"q{number}"] = {each: draw.randint(1, 4) for each in relevant}
        rankings[f"q{number}"] = draw.sample(documents, draw.randint(0, 30))
    names = f"ndcg@{k}", f"recall@{k}", f"rr@{k}"
    columns = ranking_columns(rankings, qrels, names)
    for name, score in zip(names, (ndcg, recall, reciprocal_rank), strict=True):
        for query, grades in qrels.items():
            own = score(rankings[query], grades, k)
            assert own == pytest.approx(columns[name][query], rel=0, abs=1e-9)
        assert len(set(columns[name].values())) > 1


def test_a_document_counts_at_its_first_place() -> None:
    assert ndcg(["a", "a", "a"], {"a": 2, "b": 2}, 3) == ndcg(["a", "x"], {"a": 2, "b": 2}, 3)
    assert recall(["a", "a", "b"], {"a": 1, "b": 1}, 2) == 0.5


def test_without_a_relevant_document_there_is_no_score() -> None:
    for score in (ndcg, recall, reciprocal_rank):
        with pytest.raises(ValueError, match="one relevant document"):
            score(["a"], {}, 1)
        with pytest.raises(ValueError, match="of grade 1 on"):
            score(["a"], {"a": 1, "b": 0}, 1)
        with pytest.raises(ValueError, match="1 at least"):
            score(["a"], {"a": 1}, 0)

"""Scores of what query writers have found: of their pools."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from qrag_jax.feedback.rewrite import ndcg, recall, reciprocal_rank
from qrag_jax.feedback.tries import PoolScores, QueryRewardConfig
from qrag_jax.metrics.ranking import ranking_columns


@pytest.mark.parametrize("k", [1, 5, 100])
def test_scores_are_trec_evals(k: int) -> None:
    # A document counts at its first place.
    assert ndcg(["a", "a", "a"], {"a": 2, "b": 2}, 3) == ndcg(["a", "x"], {"a": 2, "b": 2}, 3)
    assert recall(["a", "a", "b"], {"a": 1, "b": 1}, 2) == 0.5
    draw = random.Random(k)
    documents = [f"d{number}" for number in range(30)]
    qrels, rankings = {}, {}
    for number in range(80):
        relevant = draw.sample(documents, draw.randint(1, 12))
        qrels[f"q{number}"] = {item: draw.randint(1, 4) for item in relevant}
        rankings[f"q{number}"] = draw.sample(documents, draw.randint(0, 30))
    names = f"ndcg@{k}", f"recall@{k}", f"rr@{k}"
    columns = ranking_columns(rankings, qrels, names)
    for name, score in zip(names, (ndcg, recall, reciprocal_rank), strict=True):
        for query, grades in qrels.items():
            ours = score(rankings[query], grades, k)
            assert ours == pytest.approx(columns[name][query], rel=0, abs=1e-9)
        assert len(set(columns[name].values())) > 1


SCORES = PoolScores(k=3, cut=2)


def test_a_pool_by_hand() -> None:
    """Gold pages at the places 1 and 4 of 5, and a third that is not there, after two hops."""
    assert SCORES.of(["a", "x", "y", "b", "z"], ["a", "b", "c"], 2) == {
        "ap": pytest.approx((1 + 2 / 4) / 3),
        "ap_min": pytest.approx((1 + 2 / 4) / 3),
        "recall": pytest.approx(2 / 3),
        "all_gold": 0.0,
        "recall@2": pytest.approx(1 / 3),
    }
    # A claim with four pages: three passages reach 3/4 of LeReT's AP, and all of the other.
    gold = ["a", "b", "c", "d"]
    after_one = SCORES.of(["c", "a", "b"], gold, 1)
    assert (after_one["ap"], after_one["ap_min"], after_one["all_gold"]) == (0.75, 1.0, 0.0)
    after_two = SCORES.of(["c", "a", "b", "x", "d"], gold, 2)
    assert after_two["ap"] == after_two["ap_min"] == pytest.approx((3 + 4 / 5) / 4)
    assert after_two["all_gold"] == after_two["recall"] == 1.0
    # A page counts at its first place; LeReT's code gives (1 + 2/2 + 3/3) / 2 = 1.5 here.
    assert SCORES.of(["a", "a", "b"], ["a", "b"], 1)["ap"] == pytest.approx((1 + 2 / 3) / 2)
    assert SCORES.of([], ["a"], 1) == dict.fromkeys(SCORES.names, 0.0)


def test_ap_is_1_only_where_gold_comes_first() -> None:
    """Exactly so, by fractions: what is discarded as solved depends on it."""
    draw = random.Random(0)
    for _ in range(500):
        gold = [f"g{number}" for number in range(draw.randint(1, 12))]
        pool = draw.sample([*gold, "x"], len(gold) + 1)
        hits = [place for place, page in enumerate(pool, 1) if page in gold]
        exact = sum(Fraction(sum(p in gold for p in pool[:hit]), hit) for hit in hits) / len(gold)
        ap = PoolScores(k=3, cut=6).of(pool, gold, 4)["ap"]
        assert ap == pytest.approx(float(exact))
        assert (ap == 1) == (exact == 1) == (pool[-1] == "x")


def test_a_reward_is_a_score_less_the_cost() -> None:
    scores = {"ap": 0.5, "ap_min": 0.75, "recall": 1.0}
    assert QueryRewardConfig().of_hop(scores, searched=True) == 0.5
    config = QueryRewardConfig(measure="ap_min", hop_cost=0.25)
    assert config.of_hop(scores, searched=True) == 0.5
    assert config.of_hop(scores, searched=False) == 0.75

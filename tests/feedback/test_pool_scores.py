from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.feedback.pool_scores import PoolScores, QueryRewardConfig
from qrag_jax.metrics.ranking import ranking_columns

SCORES = PoolScores(k=3, cut=2)


def test_scores_by_hand() -> None:
    """Gold pages at the places 1 and 4 of 5, and a third that is not there, after two hops."""
    assert SCORES.of(["a", "x", "y", "b", "z"], ["a", "b", "c"], 2) == {
        "ap": pytest.approx((1 + 2 / 4) / 3),
        "ap_min": pytest.approx((1 + 2 / 4) / 3),
        "recall": pytest.approx(2 / 3),
        "all_gold": 0.0,
        "recall@2": pytest.approx(1 / 3),
    }


def test_each_denominator() -> None:
    """A claim with four pages: three passages reach 3/4 of LeReT's AP, and all of the other."""
    gold = ["a", "b", "c", "d"]
    after_one = SCORES.of(["c", "a", "b"], gold, 1)
    assert (after_one["ap"], after_one["ap_min"], after_one["all_gold"]) == (0.75, 1.0, 0.0)
    after_two = SCORES.of(["c", "a", "b", "x", "d"], gold, 2)
    assert after_two["ap"] == after_two["ap_min"] == pytest.approx((3 + 4 / 5) / 4)
    assert after_two["all_gold"] == after_two["recall"] == 1.0


def test_a_page_counts_at_its_first_place() -> None:
    """LeReT's code gives (1 + 2/2 + 3/3) / 2 = 1.5 here."""
    assert SCORES.of(["a", "a", "b"], ["a", "b"], 1)["ap"] == pytest.approx((1 + 2 / 3) / 2)
    assert SCORES.of(["a", "a", "a"], ["a", "b"], 1) == {
        "ap": 0.5,
        "ap_min": 0.5,
        "recall": 0.5,
        "all_gold": 0.0,
        "recall@2": 0.5,
    }


def test_an_empty_pool_scores_0() -> None:
    assert SCORES.of([], ["a"], 1) == dict.fromkeys(SCORES.names, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_trec_evals(seed: int) -> None:
    """AP, recall and recall@k by pytrec_eval; a page's second passage as another document."""
    draw = random.Random(seed)
    pages = [f"page{number}" for number in range(9)]
    gold, pools = {}, {}
    for number in range(60):
        gold[f"q{number}"] = draw.sample(pages, draw.randint(1, 5))
        pools[f"q{number}"] = draw.choices(pages, k=draw.randint(0, 12))
    scores = PoolScores(k=3, cut=6)
    found = {query: scores.of(pools[query], gold[query], 4) for query in gold}
    names = {
        query: [f"{page} again {n}" if page in pool[:n] else page for n, page in enumerate(pool)]
        for query, pool in pools.items()
    }
    qrels = {query: dict.fromkeys(keys, 1) for query, keys in gold.items()}
    columns = ranking_columns(names, qrels, ("ap", "recall@6", "recall@100"))
    for query, own in found.items():
        assert own["ap"] == pytest.approx(columns["ap"][query], abs=1e-6)
        assert own["recall@6"] == pytest.approx(columns["recall@6"][query], abs=1e-6)
        assert own["recall"] == pytest.approx(columns["recall@100"][query], abs=1e-6)
        assert own["all_gold"] == (own["recall"] == 1)


def test_ap_is_1_only_where_gold_comes_first() -> None:
    """Exactly so, by fractions: what is discarded as solved depends on it."""
    draw = random.Random(0)
    for _ in range(500):
        gold = [f"g{number}" for number in range(draw.randint(1, 12))]
        pool = draw.sample([*gold, "x"], len(gold) + 1)
        exact = sum(
            (Fraction(sum(p in gold for p in pool[:place]), place) for place in _hits(pool, gold)),
            Fraction(0),
        ) / len(gold)
        ap = PoolScores(k=3, cut=6).of(pool, gold, 4)["ap"]
        assert ap == pytest.approx(float(exact))
        assert (ap == 1) == (exact == 1) == (pool[-1] == "x")


def _hits(pool: list[str], gold: list[str]) -> list[int]:
    return [place for place, page in enumerate(pool, 1) if page in gold]


def test_a_question_without_gold_pages_is_the_callers_error() -> None:
    with pytest.raises(ValueError, match="one gold page"):
        SCORES.of(["a"], [], 1)
    with pytest.raises(ValueError, match="each once"):
        SCORES.of(["a"], ["a", "a"], 1)


def test_a_reward_is_a_score_less_the_cost() -> None:
    scores = {"ap": 0.5, "ap_min": 0.75, "recall": 1.0}
    assert QueryRewardConfig().of_hop(scores, searched=True) == 0.5
    config = QueryRewardConfig(measure="ap_min", hop_cost=0.25)
    assert config.of_hop(scores, searched=True) == 0.5
    assert config.of_hop(scores, searched=False) == 0.75


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"measure": "em"}, r"config.reward.measure"),
        ({"credit": "all"}, r"config.reward.credit"),
        ({"hop_cost": -0.1}, r"config.reward.hop_cost"),
        ({"hop_cost": float("nan")}, "config.reward.hop_cost is nan"),
        ({"recall_k": 0}, r"config.reward.recall_k"),
    ],
)
def test_a_reward_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        QueryRewardConfig(**fields)

"""Scores of an episode's searches, against hand counts, trec_eval's own code and each other."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from qrag_jax.metrics import hops
from qrag_jax.metrics.ranking import ranking_columns

FOUND = [["a", "b", "c"], ["a", "d", "b"], [], ["d", "e", "f"]]
GOLD = {"a", "d", "x"}


def test_the_episode() -> None:
    assert hops.recall(GOLD, FOUND) == 2 / 3
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert hops.ndcg(GOLD, FOUND) == pytest.approx((1 + 1 / math.log2(5)) / ideal)
    assert hops.recall(GOLD, []) == hops.ndcg(GOLD, []) == hops.recall({"x"}, FOUND) == 0


def test_hop_by_hop() -> None:
    assert hops.hop_recall(GOLD, FOUND) == (1 / 3, 1 / 3, 0, 0)
    assert hops.novelty(FOUND) == (1, 1 / 3, 0, 2 / 3)
    ideal_3, ideal_2 = 1 + 1 / math.log2(3) + 1 / 2, 1 + 1 / math.log2(3)
    assert hops.hop_ndcg(GOLD, FOUND) == pytest.approx(
        (1 / ideal_3, (1 / math.log2(3)) / ideal_2, 0, 0)
    )
    # A passage that one search returns twice counts once, and takes one place.
    assert hops.hop_ndcg({"a", "b"}, [["a", "a", "b"]]) == (1,)
    # Nothing is left to find after the first hop.
    assert hops.hop_ndcg({"a"}, FOUND) == (1, 0, 0, 0)
    assert hops.hop_recall(GOLD, []) == hops.novelty([]) == hops.hop_ndcg(GOLD, []) == ()


def test_an_episodes_scores_are_trec_evals() -> None:
    rng = random.Random(0)
    names = [str(number) for number in range(12)]
    for _ in range(100):
        found = [rng.sample(names, 3) for _ in range(rng.randint(1, 4))]
        gold = set(rng.sample(names, rng.randint(1, 4)))
        ranking = list(dict.fromkeys(itertools.chain(*found)))
        columns = ranking_columns(
            {"q": ranking}, {"q": dict.fromkeys(gold, 1)}, ["ndcg", "recall@100"]
        )
        assert hops.ndcg(gold, found) == pytest.approx(columns["ndcg"]["q"])
        assert hops.recall(gold, found) == pytest.approx(columns["recall@100"]["q"])
        assert sum(hops.hop_recall(gold, found)) == pytest.approx(hops.recall(gold, found))


def test_gold_passages_are_needed() -> None:
    for score in (hops.recall, hops.ndcg, hops.hop_recall, hops.hop_ndcg):
        with pytest.raises(ValueError, match="gold passage"):
            score([], FOUND)

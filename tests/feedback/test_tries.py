"""Tries of a query writer: their worth, which go on, and pairs by LeReT's rule."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from qrag_jax.environments.episode import Document
from qrag_jax.environments.queries import EMPTY, SEARCHED, STOPPED, QueryPrompt, QueryState
from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import (
    PairsConfig,
    StatePairs,
    Try,
    by_level,
    check_found,
    check_pairs,
    choose,
    pairs_of,
    pool_scores,
    report_of,
)
from qrag_jax.llm.text.prompts import load

LERET = PairsConfig()
LEVELS = (None, 0.0, 0.25, 0.5, 0.75, 1.0)


def a_try(query: str, reward: float | None, **fields: Any) -> Try:
    """A try; its AP is its reward, and its other scores follow from this."""
    ap = fields.pop("ap", reward or 0.0)
    scores = {"ap": ap, "recall": float(ap > 0), "all_gold": float(ap == 1)}
    unscored = {"outcome": EMPTY, "scores": {}}
    ended = {"outcome": SEARCHED, "scores": scores} if reward is not None else unscored
    start: dict[str, Any] = {"question": 5, "hop": 1, "variant": 0, "draw": 0}
    return Try(**{**start, **ended, "sampled": (7, 2), "query": query, "reward": reward, **fields})


def state(*queries: tuple[str, float | None], **fields: Any) -> list[Try]:
    """The tries of one state, by one prompt after the other."""
    return [a_try(text, reward, variant=n, **fields) for n, (text, reward) in enumerate(queries)]


def sampled(draw: random.Random, levels: Sequence[float | None], count: int) -> list[Try]:
    """A random state of up to `count` tries, in which queries, rewards and pools repeat."""
    keys = [(variant, number) for variant in range(4) for number in range(3)]
    queries = ((draw.choice("abcdefgh"), draw.choice(levels), draw.choice("pq")) for _ in keys)
    return [
        a_try(query, level, variant=variant, draw=number, pool=(pool,))
        for (variant, number), (query, level, pool) in zip(draw.sample(keys, count), queries)
    ]


# ---------------------------------------------------------------- scores of pools


def test_a_pool_by_hand() -> None:
    """Gold pages at the places 1 and 4 of 5, and a third that is not there, after two hops."""
    assert pool_scores(["a", "x", "y", "b", "z"], ["a", "b", "c"], 2, 3) == {
        "ap": pytest.approx((1 + 2 / 4) / 3),
        "ap_min": pytest.approx((1 + 2 / 4) / 3),
        "recall": pytest.approx(2 / 3),
        "all_gold": 0.0,
        "recall@6": pytest.approx(2 / 3),
    }
    # A claim with four pages: three passages reach 3/4 of LeReT's AP, and all of the other.
    after_one = pool_scores(["c", "a", "b"], ["a", "b", "c", "d"], 1, 3)
    assert (after_one["ap"], after_one["ap_min"], after_one["all_gold"]) == (0.75, 1.0, 0.0)
    # A page counts at its first place; LeReT's code gives (1 + 2/2 + 3/3) / 2 = 1.5 here.
    assert pool_scores(["a", "a", "b"], ["a", "b"], 1, 3)["ap"] == pytest.approx((1 + 2 / 3) / 2)
    assert {*pool_scores([], ["a"], 1, 3).values()} == {0.0}


def test_ap_is_1_only_where_gold_comes_first() -> None:
    """Exactly so, by fractions: what is discarded as solved depends on it."""
    draw = random.Random(0)
    for _ in range(200):
        gold = [f"g{number}" for number in range(draw.randint(1, 12))]
        pool = draw.sample([*gold, "x"], len(gold) + 1)
        hits = [place for place, page in enumerate(pool, 1) if page in gold]
        exact = sum(Fraction(sum(p in gold for p in pool[:hit]), hit) for hit in hits) / len(gold)
        ap = pool_scores(pool, gold, 4, 3)["ap"]
        assert ap == pytest.approx(float(exact))
        assert (ap == 1) == (exact == 1) == (pool[-1] == "x")


# ---------------------------------------------------------------- which go on


def shares(tries: list[Try], draws: int = 4000) -> dict[str, float]:
    """How often each query goes on."""
    chosen = (choose(tries, (0, 0, 1, question)) for question in range(draws))
    counts = collections.Counter(each.query for each in chosen if each is not None)
    return {query: pytest.approx(count / draws, abs=0.03) for query, count in counts.items()}


def test_the_weighted_choice_is_lerets() -> None:
    """The dossier's example: levels 0, 0.25 and 0.5 have the probabilities 0, 0.2 and 0.8."""
    tries = state(("zero", 0.0), ("low", 0.25), ("high", 0.5), ("high too", 0.5), ("solved", 1.0))
    assert shares(tries) == {"high": 0.4, "high too": 0.4, "low": 0.2}
    assert shares(state(("a", 0.0), ("b", 0.0))) == {"a": 0.5, "b": 0.5}  # drawn only alone
    # Another measure does not change the weights, which are average precisions.
    other = [a_try("zero", 0.1, ap=0.0), a_try("low", 0.5, ap=0.25, variant=1)]
    assert shares([*other, a_try("high", 0.7, ap=0.5, variant=2)]) == {"high": 0.8, "low": 0.2}


def test_a_choice_is_of_searches_with_a_score_and_depends_on_the_seed_alone() -> None:
    tries = [a_try("stop", 0.9, outcome=STOPPED), a_try("", None, variant=1)]
    assert choose(tries, (1,)) is choose([], (1,)) is None
    searched = a_try("a", 0.1, variant=2)
    assert choose([*tries, searched], (1,)) == searched
    assert choose(state(("a", 1.0), ("b", 1.0)), (0,)) is None  # solved
    draw, differ = random.Random(3), 0
    for number in range(100):
        tries = sampled(draw, LEVELS, draw.randint(0, 8))
        first = choose(tries, (1, 2, 3, number))
        assert choose(draw.sample(tries, len(tries)), (1, 2, 3, number)) == first
        differ += choose(tries, (1, 3, 3, number)) != first
    assert differ > 10


# ---------------------------------------------------------------- pairs


def texts(found: StatePairs) -> list[tuple[str, str]]:
    """Winner and loser of each pair."""
    return [(found.queries[a].query, found.queries[b].query) for a, b in found.pairs]


def target(found: StatePairs) -> str | None:
    return None if found.target is None else found.queries[found.target].query


def leret(tries: list[Try]) -> tuple[set[tuple[str, str]], str | None]:
    """LeReT's rule, slowly (dossier, A4): pairs of texts, and the target."""
    scored = [item for item in tries if item.reward is not None]
    if len({item.reward for item in scored}) < 2:
        return set(), None
    kept = [item for item in scored if "[1]" not in item.query]
    responses = sorted(kept, key=lambda item: item.reward or 0.0)
    reward_of = {item.query: item.reward or 0.0 for item in responses}
    levels = sorted(set(reward_of.values()))
    pairs = {
        (winner, loser)
        for low, high in itertools.pairwise(levels)
        for winner, loser in itertools.product(reward_of, repeat=2)
        if (reward_of[winner], reward_of[loser]) == (high, low)
    }
    return pairs, responses[-1].query if responses else None


def test_the_pairs_are_lerets() -> None:
    draw = random.Random(0)
    for _ in range(300):
        tries = sampled(draw, LEVELS, draw.randint(1, 9))
        tries.sort(key=lambda item: (item.variant, item.draw))
        found = pairs_of(tries, LERET)
        assert (set(texts(found)), target(found)) == leret(tries)
        assert len(texts(found)) == len(set(texts(found)))


def test_pairs_by_hand() -> None:
    # To stop is a query like others.
    stop = [a_try("bridge", 0.9, ap=1.0), a_try("stop", 1.0, outcome=STOPPED, variant=1)]
    assert texts(pairs_of(stop, LERET)) == [("stop", "bridge")]
    # A difference of the last bit is none, nor is one of case and blanks.
    assert len(by_level(state(("a", 0.1 + 0.2), ("b", 0.3), ("c", 0.3 + 1e-5)))) == 2
    cased = pairs_of(state(("River Ouse", 0.5), ("b", 0.25), ("river\t ouse", 0.0)), LERET)
    assert texts(cased) == [("River Ouse", "b")]
    # Of equal queries of one reward the first counts.
    twice = pairs_of(state(("Ouse", 0.5), ("b", 0.25), ("ouse", 0.5)), LERET)
    assert texts(twice) == [("Ouse", "b")]


def test_what_is_left_out() -> None:
    all_gold = {"ap": 0.75, "recall": 1.0, "all_gold": 1.0}  # whatever its order
    for tries, reason in (
        (state(("a", 1.0), ("b", 1.0)), "all_solved"),
        (state(("a", 0.75), ("b", 0.75), scores=all_gold), "all_solved"),
        (state(("a", 0.0), ("b", 0.0)), "all_zero"),
        (state(("a", None), ("b", 0.5)), "tied"),
        (state(("a", None), ("b", None)), "unscored"),
    ):
        found = pairs_of(tries, LERET)
        assert (found.pairs, found.target, found.reason) == ((), None, reason)
    # Queries that repeat the prompt are dropped.
    repeats = [("Passages  found so far: x", 1.0), ("the [1] y", 0.0)]
    found = pairs_of(state(("a", 0.25), *repeats, ("b", 0.5)), LERET)
    assert texts(found) == [("b", "a")]
    passage = Document("p1", "River Ouse", "It flows.", is_supporting=False)
    asked = QueryState("q", "Which sea?", (), pool=(passage,))
    _, (_, text) = QueryPrompt(load("query_writing")).messages(asked)
    assert all(item in text for item in LERET.degenerate)


# ---------------------------------------------------------------- their report


def states_of(*rewards: tuple[float | None, ...]) -> list[StatePairs]:
    """States whose tries have these rewards, by one prompt after the other."""
    return [pairs_of(state(*zip("abcd", item)), LERET) for item in rewards]


def test_tries_from_which_nothing_can_be_learned() -> None:
    check_pairs(some := states_of((0.0, 0.5), (1.0, 1.0)))  # one pair is enough
    assert "1 pairs" in report_of(some)
    assert "of 2 states" in report_of(some)
    dropped = [pairs_of(state(("[1]", 0.0), ("a", 0.5)), LERET)]
    for states, field in ((states_of((1.0, 1.0), (0.0, 0.0)), "sampling"), (dropped, "pairs")):
        with pytest.raises(InputError, match=rf"config\.{field}\."):
            check_pairs(states)
    nothing = state(("a", 0.0), ("b", 0.0), ("c", None))  # none found a gold page
    with pytest.raises(InputError, match=r"config\.search\.index"):
        check_found(nothing)
    check_found([*nothing, *state(("d", 0.5))])

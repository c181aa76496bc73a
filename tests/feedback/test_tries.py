"""Tries of a query writer: kept exactly, which go on, their credit, and LeReT's pairs of them."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.episode import Document
from qrag_jax.environments.queries import EMPTY, SEARCHED, STOPPED, QueryPrompt, QueryState
from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import (
    CHOICES,
    NextStatesConfig,
    PairsConfig,
    PoolScores,
    QueryRewardConfig,
    StateKey,
    StatePairs,
    Try,
    TryKey,
    by_level,
    check_found,
    check_pairs,
    choose,
    credited,
    pairs_of,
    report_of,
    uniform,
)
from qrag_jax.llm.text.prompts import load
from qrag_jax.systems.leret_tries import TRIES

LERET = PairsConfig()
LEVELS = (None, 0.0, 0.25, 0.5, 0.75, 1.0)


def a_try(query: str, reward: float | None, **fields: Any) -> Try:
    """A try; its AP is its reward, and its other scores follow from this."""
    ap = fields.pop("ap", reward or 0.0)
    scores = {"ap": ap, "recall": float(ap > 0), "all_gold": float(ap == 1)}
    unscored = {"outcome": EMPTY, "scores": {}}
    ended = {"outcome": SEARCHED, "scores": scores} if reward is not None else unscored
    start: dict[str, Any] = {"question": 5, "hop": 1, "state": 0, "variant": 0, "draw": 0}
    turn: dict[str, Any] = {"sampled": (7, 2), "log_probs": (-0.5, -0.25), "finish": "stop"}
    return Try(**{**start, **turn, **ended, "query": query, "reward": reward, **fields})


def state(*queries: tuple[str, float | None], **fields: Any) -> list[Try]:
    """The tries of one state, by one prompt after the other."""
    return [a_try(text, reward, variant=n, **fields) for n, (text, reward) in enumerate(queries)]


def drawn(draw: random.Random, levels: Sequence[float | None], count: int) -> list[Try]:
    """A random state of up to `count` tries, in which queries, rewards and pools repeat."""
    keys = [(variant, number) for variant in range(4) for number in range(3)]
    return [
        a_try(
            draw.choice("abcdefgh"),
            draw.choice(levels),
            variant=variant,
            draw=number,
            pool=(draw.choice("pq"),),
        )
        for variant, number in draw.sample(keys, draw.randint(0, count))
    ]


# ---------------------------------------------------------------- tries


def test_a_log_of_tries_is_exact(tmp_path: Path) -> None:
    """Numbers to the last bit, and text that is not well-formed."""
    draw, items = random.Random(0), list[Try]()
    for count in (0, 20):
        log_probs = tuple(float(np.float32(-draw.expovariate(1.0))) for _ in range(count))
        found = ("p1", draw.random()), ("p2", -draw.random() * 1e-300)
        more: dict[str, Any] = {"pool": ("p0", "p1", "p2"), "version": "step-7"}
        query = 'wo "ist" \udc80 東京\u2028?'
        items.append(a_try(query, draw.random() / 3, log_probs=log_probs, found=found, **more))
    items.append(a_try("", None, outcome="timeout", finish=""))
    TRIES.append(tmp_path / "tries.jsonl", items)
    assert TRIES.read(tmp_path / "tries.jsonl") == items


# ---------------------------------------------------------------- scores of pools

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
    assert SCORES.of([], ["a"], 1) == dict.fromkeys(
        ("ap", "ap_min", "recall", "all_gold", "recall@2"), 0.0
    )


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


# ---------------------------------------------------------------- credit of later hops


def three_hops() -> tuple[list[Try], dict[StateKey, TryKey]]:
    """One question; at hop 1 try a goes on, at hop 2 the tries b and c do."""
    tries = [
        a_try("other", 0.5, variant=0, pool="x"),
        a_try("a", 0.25, variant=1, pool="y"),
        a_try("a again", 0.25, variant=2, pool="y"),
        a_try("stop", 0.0, variant=3, pool="y", outcome=STOPPED),
        a_try("b", 0.25, hop=2, variant=0, pool="yb"),
        a_try("c", 0.5, hop=2, variant=1, pool="yc"),
        a_try("", None, hop=2, variant=2),
        a_try("d", 1.0, hop=3, state=0, pool="ybd"),
        a_try("e", 0.4, hop=3, state=1, pool="yce"),
    ]
    parents = {(2, 0): tries[1], (3, 0): tries[4], (3, 1): tries[5]}
    return tries, {StateKey(5, *at): parent.key for at, parent in parents.items()}


def test_the_best_later_hop_is_credited_back() -> None:
    """1.0 comes back through b to a, whose twin shares it; c keeps its own, which is higher."""
    tries, grown_from = three_hops()
    assert credited(tries, grown_from, QueryRewardConfig()) == tries
    later = QueryRewardConfig(credit="best_later")
    got = credited(tries, grown_from, later)
    assert [item.reward for item in got] == [0.5, 1.0, 1.0, 0.0, 1.0, 0.5, None, 1.0, 0.4]
    assert [item.key for item in got] == [item.key for item in tries]
    assert credited(got, grown_from, later) == got
    cost = QueryRewardConfig(credit="best_later", hop_cost=0.125)  # of each hop on the way
    paid = [item.reward for item in credited(tries, grown_from, cost)]
    assert paid[:6] == [0.5, 0.75, 0.75, 0.0, 0.875, 0.5]
    failed = [a_try("a", 0.25, pool="y"), a_try("", None, hop=2)]
    got = credited(failed, {StateKey(5, 2, 0): failed[0].key}, later)
    assert [item.reward for item in got] == [0.25, None]


# ---------------------------------------------------------------- which go on


def chosen(tries: list[Try], config: NextStatesConfig, seed: tuple[int, ...]) -> Try:
    found = choose(tries, config, seed)
    assert found is not None
    return found


def shares(tries: list[Try], draws: int = 4000, **fields: Any) -> dict[str, float]:
    """How often each query goes on by the weighted choice."""
    config = NextStatesConfig(**fields)
    counts = collections.Counter(
        chosen(tries, config, (0, 0, 1, question)).query for question in range(draws)
    )
    return {query: pytest.approx(count / draws, abs=0.03) for query, count in counts.items()}


def test_the_weighted_choice_is_lerets() -> None:
    """The dossier's example: levels 0, 0.25 and 0.5 have the probabilities 0, 0.2 and 0.8."""
    tries = state(("zero", 0.0), ("low", 0.25), ("high", 0.5), ("high too", 0.5), ("solved", 1.0))
    assert shares(tries) == {"high": 0.4, "high too": 0.4, "low": 0.2}
    # A level of 0 is drawn only alone.
    assert shares(state(("a", 0.0), ("b", 0.0))) == {"a": 0.5, "b": 0.5}
    assert shares(state(("a", 0.0), ("b", 0.01)), 500) == {"b": 1.0}
    # A cost does not change the weights, which are average precisions.
    costly = [a_try("zero", -0.1, ap=0.0), a_try("low", 0.15, ap=0.25, variant=1)]
    assert shares([*costly, a_try("high", 0.4, ap=0.5, variant=2)]) == {"high": 0.8, "low": 0.2}
    assert shares(state(("a", 0.5), ("b", 1.0)), solved_go_on=True) == {"a": 0.25, "b": 0.75}


@pytest.mark.parametrize("choice", CHOICES)
def test_only_searches_with_a_score_go_on(choice: str) -> None:
    best = state(("a", 0.25), ("b", 0.5), ("c", 0.5), ("d", 0.4))
    assert choice == "weighted" or chosen(best, NextStatesConfig(choice), ()).query == "b"
    tries = [a_try("stop", 0.9, outcome=STOPPED), a_try("", None, variant=1)]
    config = NextStatesConfig(choice)
    assert choose(tries, config, (1,)) is choose([], config, (1,)) is None
    searched = a_try("a", 0.1, variant=2)
    assert choose([*tries, searched], config, (1,)) == searched
    solved = state(("a", 1.0), ("b", 1.0))
    assert choose(solved, NextStatesConfig(choice), (0,)) is None
    assert choose(solved, NextStatesConfig(choice, solved_go_on=True), (0,))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_depends_on_the_tries_and_the_seed_alone(choice: str) -> None:
    draw = random.Random(3)
    config = NextStatesConfig(choice)
    differ = 0
    for number in range(200):
        tries = drawn(draw, (None, 0.0, 0.25, 0.5, 1.0), 8)
        first = choose(tries, config, (1, 2, 3, number))
        random.seed(number)  # as whatever else draws might leave it
        assert choose(draw.sample(tries, len(tries)), config, (1, 2, 3, number)) == first
        assert first is None or (first in tries and first.searched and first.scores["ap"] < 1)
        differ += choose(tries, config, (1, 3, 3, number)) != first
    assert (differ > 20) == (choice == "weighted")


def test_a_draw_is_as_before() -> None:
    assert uniform("test", (1, 2)) == 0.9187313531666456  # runs that were begun go on alike


# ---------------------------------------------------------------- pairs


def texts(found: StatePairs) -> list[tuple[str, str]]:
    """Winner and loser of each pair."""
    return [(found.queries[p.winner].query, found.queries[p.loser].query) for p in found.pairs]


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


def test_the_defaults_are_lerets_rule() -> None:
    draw = random.Random(0)
    for _ in range(500):
        tries = sorted(drawn(draw, LEVELS, 9), key=lambda item: item.key)
        found = pairs_of(tries, LERET)
        assert (set(texts(found)), target(found)) == leret(tries)
        assert len(texts(found)) == len(set(texts(found)))


def test_pairs_by_hand() -> None:
    found = pairs_of(state(("a", 0.5), ("b", 0.0), ("c", 0.25), ("d", 0.0)), LERET)
    assert texts(found) == [("c", "b"), ("c", "d"), ("a", "c")]
    assert [tuple(pair) for pair in found.pairs] == [(2, 0), (2, 1), (3, 2)]
    assert (target(found), found.reason, found.levels) == ("a", "paired", 3)
    # Ties are in the order of prompt and draw; a repeated query is the one it repeats.
    assert target(pairs_of(state(("a", 0.5), ("b", 0.0), ("c", 0.5)), LERET)) == "c"
    again = pairs_of(state(("A", 0.5), ("b", 0.0), ("c", 0.5), ("a", 0.5)), LERET)
    assert target(again) == "A"
    # To stop is a query like others.
    stop = [a_try("bridge", 0.9, ap=1.0), a_try("stop", 1.0, outcome=STOPPED, variant=1)]
    assert texts(pairs_of(stop, LERET)) == [("stop", "bridge")]
    four = state(("a", 0.0), ("b", 0.25), ("c", 0.375), ("d", 1.0))
    for pairing, pairs in {"best": "da db dc", "all": "ba ca da cb db dc"}.items():
        assert " ".join(map("".join, texts(pairs_of(four, PairsConfig(pairing))))) == pairs
    # A difference of the last bit is none, nor is one of case and blanks.
    assert len(by_level(state(("a", 0.1 + 0.2), ("b", 0.3), ("c", 0.3 + 1e-5)))) == 2
    cased = pairs_of(state(("River Ouse", 0.5), ("b", 0.25), ("river\t ouse", 0.0)), LERET)
    assert (texts(cased), cased.variants) == ([("River Ouse", "b")], ((1,), (2, 0)))


def test_queries_that_repeat_the_prompt_are_dropped() -> None:
    repeats = [("Passages  found so far: x", 1.0), ("the [1] y", 0.0)]
    tries = state(("a", 0.25), *repeats, ("b", 0.5))
    found = pairs_of(tries, LERET)
    assert (texts(found), found.degenerate) == ([("b", "a")], 2)
    assert pairs_of(tries, PairsConfig(degenerate=())).degenerate == 0
    passage = Document("p1", "River Ouse", "It flows.", is_supporting=False)
    asked = QueryState("q", "Which sea?", (), pool=(passage,))
    _, (_, text) = QueryPrompt(load("query_writing")).messages(asked)
    assert all(item in text for item in LERET.degenerate)


def test_states_without_pairs() -> None:
    for rewards, reason in (
        ((1.0, 1.0), "all_solved"),
        ((0.0, 0.0), "all_zero"),
        ((None, 0.5), "tied"),
        ((None, None), "unscored"),
    ):
        found = pairs_of(state(*zip("ab", rewards)), LERET)
        assert (found.pairs, found.target, found.reason) == ((), None, reason)
    # All gold is solved, whatever its order.
    scores = {"ap": 0.75, "recall": 1.0, "all_gold": 1.0}
    assert pairs_of(state(("a", 0.75), ("b", 0.75), scores=scores), LERET).reason == "all_solved"


# ---------------------------------------------------------------- their report


def report(*rewards: tuple[float | None, ...]) -> dict[str, Any]:
    """Of states whose tries have these rewards, by one prompt after the other."""
    return report_of([pairs_of(state(*zip("abcd", item)), LERET) for item in rewards])


def test_what_is_counted() -> None:
    """Two states with pairs, one tie of each kind, and one state whose tries all failed."""
    found = report((0.0, 0.5, 0.25), (0.5, 0.0), (1.0, 1.0), (0.0, 0.0), (0.5, None), (None, None))
    ties = {"all_solved": 1, "all_zero": 1, "tied": 1}
    assert found["states"] == {"paired": 2, **ties, "unpaired": 0, "unscored": 1}
    assert (found["shares"]["paired"], found["all_ties"]) == (2 / 6, 0.5)
    assert (found["pairs"], found["targets"], found["degenerate"]) == (3, 2, 0)
    assert found["queries"] == pytest.approx((3 + 2 + 2 + 2 + 1) / 5)
    assert found["levels"] == pytest.approx((3 + 2 + 1 + 1 + 1) / 5)
    assert (found["wins"], found["best"]) == ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1})
    # A query of two prompts wins for both.
    twice = report_of([pairs_of(state(("a", 0.5), ("b", 0.0), ("A", 0.5)), LERET)])
    assert (twice["pairs"], twice["wins"], twice["best"]) == (1, {0: 1, 2: 1}, {0: 1, 2: 1})


def test_tries_from_which_nothing_can_be_learned() -> None:
    check_pairs(report((0.0, 0.5), (1.0, 1.0)))  # one pair is enough
    with pytest.raises(InputError, match=r"config\.sampling\.temperature"):
        check_pairs(report((1.0, 1.0), (0.0, 0.0)))
    dropped = report_of([pairs_of(state(("[1]", 0.0), ("a", 0.5)), LERET)])
    with pytest.raises(InputError, match=r"config\.pairs\.degenerate"):
        check_pairs(dropped)
    nothing = state(("a", 0.0), ("b", 0.0), ("c", None))  # none found a gold page
    with pytest.raises(InputError, match=r"config\.search\.index"):
        check_found(nothing)
    check_found([*nothing, *state(("d", 0.5))])
    check_found(state(("a", None)))  # what failed says nothing of the corpus

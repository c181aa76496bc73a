from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import STOPPED, QueryState
from qrag_jax.environments.tools.episode import Document
from qrag_jax.errors import InputError
from qrag_jax.feedback.preference_pairs import (
    PAIRINGS,
    TIES,
    PairsConfig,
    StatePairs,
    normalised_query,
    pairs_of,
)
from qrag_jax.feedback.tries import Try
from qrag_jax.llm.text.prompts import load
from tests.feedback.tries_maker import drawn, made, state

LERET = PairsConfig()
LEVELS = (None, 0.0, 0.25, 0.5, 0.75, 1.0)


def texts(found: StatePairs) -> list[tuple[str, str]]:
    """Winner and loser of each pair."""
    return [(found.queries[p.winner].query, found.queries[p.loser].query) for p in found.pairs]


def target(found: StatePairs) -> str | None:
    return None if found.target is None else found.queries[found.target].query


# ---------------------------------------------------------------- LeReT's rule, written slowly


def leret(tries: list[Try]) -> tuple[set[tuple[str, str]], str | None]:
    """Pairs of texts, and the target, as the dossier has it (A4); the tries in program order."""
    scored = [each for each in tries if each.reward is not None]
    if len({each.reward for each in scored}) < 2:
        return set(), None
    kept = [each for each in scored if "[1]" not in each.query]
    responses = sorted(kept, key=lambda each: each.reward or 0.0)
    reward_of: dict[str, float] = {}
    for each in responses:
        reward_of[each.query] = each.reward or 0.0
    found = sorted(set(reward_of.values()))
    pairs = {
        (winner, loser)
        for low, high in itertools.pairwise(found)
        for winner, loser in itertools.product(reward_of, repeat=2)
        if (reward_of[winner], reward_of[loser]) == (high, low)
    }
    return pairs, responses[-1].query if responses else None


@pytest.mark.parametrize("seed", range(3))
def test_the_defaults_are_lerets_rule(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        tries = sorted(drawn(draw, LEVELS, 9), key=lambda each: each.key)
        found = pairs_of(tries, LERET)
        assert (set(texts(found)), target(found)) == leret(tries)
        assert len(texts(found)) == len(set(texts(found)))


def test_levels_of_2_1_and_1() -> None:
    found = pairs_of(state(("a", 0.5), ("b", 0.0), ("c", 0.25), ("d", 0.0)), LERET)
    assert [each.query for each in found.queries] == ["b", "d", "c", "a"]
    assert texts(found) == [("c", "b"), ("c", "d"), ("a", "c")]
    assert [tuple(pair) for pair in found.pairs] == [(2, 0, 1.0), (2, 1, 1.0), (3, 2, 1.0)]
    assert (target(found), found.reason, found.levels) == ("a", "paired", 3)


@pytest.mark.parametrize(
    ("rewards", "pairs"),
    [
        ((0.0, 0.0, 0.5, 0.5), 4),
        ((0.0, 0.5, 0.5, 1.0), 4),
        ((0.0, 0.5, 0.5, 0.5), 3),
        ((0.0, 0.25, 0.5, 1.0), 3),
    ],
)
def test_four_variants_give_four_pairs_at_most(rewards: tuple[float, ...], pairs: int) -> None:
    assert len(pairs_of(state(*zip("abcd", rewards)), LERET).pairs) == pairs


def test_of_equal_queries_the_first_of_the_best_counts() -> None:
    """Equal without regard to case and blanks; the prompts that led to it are all listed."""
    tries = state(("River Ouse", 0.5), ("b", 0.0), ("river\t ouse", 0.5), ("c", 0.25), ("B ", 0.0))
    found = pairs_of(tries, LERET)
    assert [each.query for each in found.queries] == ["b", "c", "River Ouse"]
    assert found.variants == ((1, 4), (3,), (0, 2))
    cased = pairs_of(state(("A", 0.5), ("b", 0.25), ("a", 0.0)), LERET)
    assert [(each.query, each.reward) for each in cased.queries] == [("b", 0.25), ("A", 0.5)]
    assert (texts(cased), target(cased), cased.variants) == ([("A", "b")], "A", ((1,), (2, 0)))


def test_the_target_is_the_last_of_the_best() -> None:
    """Ties are in the order of prompt and draw; a repeated query is the one it repeats."""
    assert target(pairs_of(state(("a", 0.5), ("b", 0.0), ("c", 0.5)), LERET)) == "c"
    found = pairs_of(state(("A", 0.5), ("b", 0.0), ("c", 0.5), ("a", 0.5)), LERET)
    assert target(found) == "A"


def test_tied_states_are_left_out() -> None:
    for rewards, reason in (
        ((1.0, 1.0), "all_solved"),
        ((0.0, 0.0), "all_zero"),
        ((0.5, 0.5), "tied"),
        ((None, 0.5), "tied"),
    ):
        found = pairs_of(state(*zip("ab", rewards)), LERET)
        assert (found.pairs, found.target, found.reason, found.levels) == ((), None, reason, 1)


def test_a_state_without_a_score() -> None:
    for tries in ([], state(("a", None), ("b", None))):
        found = pairs_of(tries, PairsConfig(tied_share=1.0, solved_share=1.0))
        assert (found.queries, found.pairs, found.target) == ((), (), None)
        assert (found.reason, found.levels) == ("unscored", 0)


def test_queries_that_repeat_the_prompt_are_dropped() -> None:
    tries = state(
        ("a", 0.25),
        ("Passages  found so far: x", 1.0),
        ("the [1] y", 0.0),
        ("PASSAGES FOUND SO FAR", 0.0),
        ("b", 0.5),
    )
    found = pairs_of(tries, LERET)
    assert (texts(found), found.degenerate) == ([("b", "a")], 3)
    kept = pairs_of(tries, PairsConfig(degenerate=()))
    assert (len(kept.queries), kept.degenerate) == (5, 0)


def test_what_is_dropped_is_what_the_prompt_shows() -> None:
    passage = Document("p1", "River Ouse", "It flows.", is_supporting=False)
    asked = QueryState("q", "Which sea?", (), pool=(passage,))
    _, (_, text) = QueryPrompt(load("query_writing")).messages(asked)
    assert all(each in text for each in LERET.degenerate)


def test_a_state_that_only_dropped_queries_tell_apart() -> None:
    """As with LeReT: rewards differ, so it is no tie, and what is left is a target."""
    found = pairs_of(state(("a", 0.5), ("[1]", 0.0)), LERET)
    assert (found.pairs, target(found), found.reason) == ((), "a", "unpaired")
    nothing = pairs_of(state(("[1] x", 0.5), ("[1]", 0.0)), LERET)
    assert (nothing.queries, nothing.target, nothing.reason) == ((), None, "unpaired")


def test_to_stop_is_a_query_like_others() -> None:
    tries = [
        made("bridge", 0.9, ap=1.0),
        made("stop", 1.0, outcome=STOPPED, variant=1),
    ]
    found = pairs_of(tries, LERET)
    assert (texts(found), target(found)) == ([("stop", "bridge")], "stop")


# ---------------------------------------------------------------- beyond LeReT

FOUR = state(("a", 0.0), ("b", 0.25), ("c", 0.375), ("d", 1.0))


def test_other_pairings() -> None:
    assert texts(pairs_of(FOUR, PairsConfig("adjacent"))) == [("b", "a"), ("c", "b"), ("d", "c")]
    assert texts(pairs_of(FOUR, PairsConfig("best"))) == [("d", "a"), ("d", "b"), ("d", "c")]
    assert texts(pairs_of(FOUR, PairsConfig("all"))) == [
        *[("b", "a"), ("c", "a"), ("d", "a")],
        *[("c", "b"), ("d", "b"), ("d", "c")],
    ]


def test_a_least_gap() -> None:
    found = pairs_of(FOUR, PairsConfig("all", least_gap=0.375))
    assert texts(found) == [("c", "a"), ("d", "a"), ("d", "b"), ("d", "c")]
    rounded = state(("a", 0.5), ("b", 0.6))
    assert 0.6 - 0.5 < 0.1
    assert len(pairs_of(rounded, PairsConfig(least_gap=0.1)).pairs) == 1
    none = pairs_of(FOUR, PairsConfig(least_gap=2.0))
    assert (none.pairs, none.reason, target(none)) == ((), "unpaired", "d")


def test_a_cap_keeps_the_largest_gaps() -> None:
    found = pairs_of(FOUR, PairsConfig("all", cap=3))
    assert texts(found) == [("d", "a"), ("d", "b"), ("d", "c")]
    equal = state(("a", 0.0), ("b", 0.1), ("c", 0.2), ("d", 0.1 + 0.2))
    assert texts(pairs_of(equal, PairsConfig(cap=2))) == [("b", "a"), ("c", "b")]


def test_weights_are_gaps() -> None:
    found = pairs_of(FOUR, PairsConfig("best", weighted_by_gap=True))
    assert [pair.weight for pair in found.pairs] == [1.0, 0.75, 0.625]


@pytest.mark.parametrize("seed", range(3))
def test_what_holds_for_all_states(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        tries = drawn(draw, LEVELS, 9)
        gap = draw.choice((0.0, 0.25, 0.3))
        got = {p: pairs_of(tries, PairsConfig(p, least_gap=gap)) for p in PAIRINGS}
        told = {pairing: set(texts(found)) for pairing, found in got.items()}
        assert told["adjacent"] <= told["all"]
        assert told["best"] <= told["all"]
        for pairing, found in got.items():
            assert pairs_of(draw.sample(tries, len(tries)), PairsConfig(pairing, gap)) == found
            forms = [normalised_query(each.query) for each in found.queries]
            assert len(set(forms)) == len(forms)
            for pair in found.pairs:
                winner, loser = found.queries[pair.winner], found.queries[pair.loser]
                assert winner.reward > loser.reward  # type: ignore[operator]
                assert winner.reward - loser.reward >= gap  # type: ignore[operator]
            capped = pairs_of(tries, PairsConfig(pairing, gap, cap=2))
            assert len(capped.pairs) == min(2, len(found.pairs))
            assert set(capped.pairs) <= set(found.pairs)
            if found.pairs:
                least = min(_gap(capped, pair) for pair in capped.pairs)
                left_out = set(found.pairs) - set(capped.pairs)
                assert all(_gap(found, pair) <= least for pair in left_out)
            assert (found.target is None) == (found.reason in (*TIES, "unscored"))
            best = max((each.reward for each in tries if each.reward is not None), default=0.0)
            of_best = {normalised_query(each.query) for each in tries if each.reward == best}
            assert found.target is None or forms[found.target] in of_best


def _gap(found: StatePairs, pair: Any) -> float:
    return found.queries[pair.winner].reward - found.queries[pair.loser].reward  # type: ignore


# ---------------------------------------------------------------- what is kept for SFT


def kept(reward: float, config: PairsConfig, seed: tuple[int, ...] = (0, 0)) -> list[int]:
    """Questions whose tied state has a target."""
    states = ((n, state(("a", reward), ("b", reward), question=n)) for n in range(1000))
    return [number for number, tries in states if pairs_of(tries, config, seed).target is not None]


def test_shares_of_states_without_pairs_are_kept() -> None:
    config = PairsConfig(solved_share=0.25, tied_share=0.5)
    assert len(kept(1.0, config)) == pytest.approx(250, abs=45)
    assert len(kept(0.5, config)) == pytest.approx(500, abs=50)
    assert kept(0.0, config) == kept(0.5, config)
    assert kept(0.5, config, (0, 1)) != kept(0.5, config)
    assert len(kept(1.0, PairsConfig(solved_share=1.0))) == 1000
    assert kept(0.5, PairsConfig(solved_share=1.0)) == []
    assert set(kept(1.0, config)) <= set(kept(1.0, PairsConfig(solved_share=0.5)))


def test_a_kept_state_has_no_pairs() -> None:
    found = pairs_of(state(("a", 1.0), ("b", 1.0)), PairsConfig(solved_share=1.0))
    assert (found.pairs, target(found), found.reason) == ((), "b", "all_solved")


def test_all_gold_is_solved_whatever_its_order() -> None:
    scores = {"ap": 0.75, "recall": 1.0, "all_gold": 1.0}
    tries = state(("a", 0.75), ("b", 0.75), scores=scores)
    assert pairs_of(tries, LERET).reason == "all_solved"


# ---------------------------------------------------------------- files and bad input


def test_tries_of_two_states_are_refused() -> None:
    with pytest.raises(ValueError, match="of several states"):
        pairs_of([made("a", 0.5), made("b", 0.5, state=1)], LERET)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pairing": "any"}, r"config.pairs.pairing"),
        ({"least_gap": -0.1}, r"config.pairs.least_gap"),
        ({"least_gap": float("inf")}, r"config.pairs.least_gap"),
        ({"cap": -1}, r"config.pairs.cap"),
        ({"solved_share": 1.1}, r"config.pairs.solved_share"),
        ({"tied_share": float("nan")}, r"config.pairs.tied_share"),
        ({"degenerate": ("x", " ")}, r"config.pairs.degenerate"),
    ],
)
def test_pairs_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PairsConfig(**fields)

from __future__ import annotations

import pytest

from qrag_jax.environments.query_writing.state import STOPPED
from qrag_jax.feedback.later_credit import credited
from qrag_jax.feedback.pool_scores import QueryRewardConfig
from qrag_jax.feedback.tries import StateKey, Try, TryKey
from tests.feedback.tries_maker import made

LATER = QueryRewardConfig(credit="best_later")


def rewards(tries: list[Try]) -> list[float | None]:
    return [each.reward for each in tries]


def three_hops() -> tuple[list[Try], dict[StateKey, TryKey]]:
    """One question; at hop 1 try a goes on, at hop 2 the tries b and c do."""
    tries = [
        made("other", 0.5, variant=0, pool=("x",)),
        made("a", 0.25, variant=1, pool=("y",)),
        made("a again", 0.25, variant=2, pool=("y",)),
        made("stop", 0.0, variant=3, pool=("y",), outcome=STOPPED),
        made("b", 0.25, hop=2, variant=0, pool=("y", "b")),
        made("c", 0.5, hop=2, variant=1, pool=("y", "c")),
        made("", None, hop=2, variant=2),
        made("d", 1.0, hop=3, state=0, pool=("y", "b", "d")),
        made("e", 0.4, hop=3, state=1, pool=("y", "c", "e")),
    ]
    grown_from = {
        StateKey(5, 2, 0): tries[1].key,
        StateKey(5, 3, 0): tries[4].key,
        StateKey(5, 3, 1): tries[5].key,
    }
    return tries, grown_from


def test_credit_of_the_hop_changes_nothing() -> None:
    tries, grown_from = three_hops()
    assert credited(tries, grown_from, QueryRewardConfig()) == tries


def test_the_best_later_hop_is_credited_back() -> None:
    """1.0 comes back through b to a, whose twin shares it; c keeps its own, which is higher."""
    tries, grown_from = three_hops()
    got = credited(tries, grown_from, LATER)
    assert rewards(got) == [0.5, 1.0, 1.0, 0.0, 1.0, 0.5, None, 1.0, 0.4]
    assert [each.key for each in got] == [each.key for each in tries]
    assert credited(got, grown_from, LATER) == got


def test_each_hop_on_the_way_costs() -> None:
    tries, grown_from = three_hops()
    config = QueryRewardConfig(credit="best_later", hop_cost=0.125)
    assert rewards(credited(tries, grown_from, config))[:6] == [0.5, 0.75, 0.75, 0.0, 0.875, 0.5]


def test_a_state_whose_tries_all_failed_gives_nothing() -> None:
    tries = [made("a", 0.25, pool=("y",)), made("", None, hop=2)]
    got = credited(tries, {StateKey(5, 2, 0): tries[0].key}, LATER)
    assert rewards(got) == [0.25, None]


def test_wrong_parents_are_refused() -> None:
    tries, grown_from = three_hops()
    with pytest.raises(ValueError, match="did not search"):
        credited(tries, grown_from | {StateKey(5, 2, 0): tries[3].key}, LATER)
    with pytest.raises(ValueError, match="did not search"):
        credited(tries, grown_from | {StateKey(5, 2, 0): TryKey(5, 1, 0, 9, 9)}, LATER)
    with pytest.raises(ValueError, match="hop before"):
        credited(tries, grown_from | {StateKey(5, 3, 0): tries[1].key}, LATER)

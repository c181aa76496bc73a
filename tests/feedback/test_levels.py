from __future__ import annotations

from qrag_jax.feedback.levels import by_level, in_order
from tests.feedback.tries_maker import made, state


def test_scored_tries_are_put_in_order() -> None:
    tries = [
        made("d", 0.1, state=1),
        made("c", 0.2, variant=1),
        made("b", 0.3, draw=1),
        made("x", None),
        made("a", 0.4),
    ]
    assert [each.query for each in in_order(tries)] == ["a", "b", "c", "d"]


def test_levels_ascend_and_keep_the_order() -> None:
    tries = state(("a", 0.5), ("b", 0.0), ("c", 0.5), ("d", 0.25))
    queries = [[each.query for each in level] for level in by_level(tries)]
    assert queries == [["b"], ["d"], ["a", "c"]]


def test_a_difference_of_the_last_bit_is_none() -> None:
    assert 0.1 + 0.2 != 0.3
    assert len(by_level(state(("a", 0.1 + 0.2), ("b", 0.3), ("c", 0.3 + 1e-5)))) == 2

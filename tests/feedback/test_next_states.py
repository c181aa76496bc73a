from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.query_writing.state import STOPPED
from qrag_jax.errors import InputError
from qrag_jax.feedback.next_states import CHOICES, NextStatesConfig, choose, uniform
from qrag_jax.feedback.tries import Try
from tests.feedback.tries_maker import drawn, made, state

WEIGHTED = NextStatesConfig()
GREEDY = NextStatesConfig("greedy")


def shares(tries: list[Try], config: NextStatesConfig, draws: int = 4000) -> dict[str, float]:
    """How often each query goes on."""
    counts = collections.Counter(
        choose(tries, config, (0, 0, 1, question))[0].query for question in range(draws)
    )
    return {query: count / draws for query, count in sorted(counts.items())}


def test_the_weighted_choice_is_lerets() -> None:
    """The dossier's example: levels 0, 0.25 and 0.5 have the probabilities 0, 0.2 and 0.8."""
    tries = state(("zero", 0.0), ("low", 0.25), ("high", 0.5), ("high too", 0.5), ("solved", 1.0))
    found = shares(tries, WEIGHTED)
    assert found == {
        "high": pytest.approx(0.4, abs=0.025),
        "high too": pytest.approx(0.4, abs=0.025),
        "low": pytest.approx(0.2, abs=0.02),
    }


def test_a_level_of_0_is_drawn_only_alone() -> None:
    assert shares(state(("a", 0.0), ("b", 0.0)), WEIGHTED) == {
        "a": pytest.approx(0.5, abs=0.03),
        "b": pytest.approx(0.5, abs=0.03),
    }
    assert shares(state(("a", 0.0), ("b", 0.01)), WEIGHTED, 500) == {"b": 1.0}


def test_a_cost_does_not_change_the_weights() -> None:
    """Rewards are 0.1 lower than the average precisions, which are the weights."""
    tries = [
        made("zero", -0.1, ap=0.0),
        made("low", 0.15, ap=0.25, variant=1),
        made("high", 0.4, ap=0.5, variant=2),
    ]
    assert shares(tries, WEIGHTED) == {
        "high": pytest.approx(0.8, abs=0.02),
        "low": pytest.approx(0.2, abs=0.02),
    }


@pytest.mark.parametrize("choice", CHOICES)
def test_solved_states_go_on_if_asked(choice: str) -> None:
    solved = state(("a", 1.0), ("b", 1.0))
    assert choose(solved, NextStatesConfig(choice), (0,)) == []
    assert choose(solved, NextStatesConfig(choice, solved_go_on=True), (0,))


def test_a_solved_level_weighs_one_and_a_half() -> None:
    found = shares(state(("a", 0.5), ("b", 1.0)), NextStatesConfig(solved_go_on=True))
    assert found == {"a": pytest.approx(0.25, abs=0.02), "b": pytest.approx(0.75, abs=0.02)}


def test_the_greedy_choice_is_the_best() -> None:
    tries = state(("a", 0.25), ("b", 0.5), ("c", 0.5))
    assert [each.query for each in choose(tries, GREEDY, ())] == ["b"]


def test_several_are_the_best_of_different_pools() -> None:
    """Pools of the same passages in another order are different: prompts show the order."""
    tries = [
        made("a", 0.25, pool=("p",)),
        made("b", 0.5, variant=1, pool=("q", "r")),
        made("c", 0.5, variant=2, pool=("q", "r")),
        made("d", 0.4, variant=3, pool=("r", "q")),
    ]
    for count, expected in (
        (1, ["b"]),
        (2, ["b", "d"]),
        (3, ["b", "d", "a"]),
        (9, ["b", "d", "a"]),
    ):
        config = NextStatesConfig("several", count=count)
        assert [each.query for each in choose(tries, config, ())] == expected


@pytest.mark.parametrize("choice", CHOICES)
def test_only_searches_with_a_score_go_on(choice: str) -> None:
    tries = [made("stop", 0.9, outcome=STOPPED), made("", None, variant=1)]
    config = NextStatesConfig(choice, count=9)
    assert choose(tries, config, (1,)) == []
    assert choose([], config, (1,)) == []
    searched = made("a", 0.1, variant=2)
    assert choose([*tries, searched], config, (1,)) == [searched]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_depends_on_the_tries_and_the_seed_alone(choice: str) -> None:
    draw = random.Random(3)
    config = NextStatesConfig(choice)
    differ = 0
    for number in range(200):
        tries = drawn(draw, (None, 0.0, 0.25, 0.5, 1.0), 8)
        first = choose(tries, config, (1, 2, 3, number))
        random.seed(number)  # as whatever else draws might leave it
        shuffled = draw.sample(tries, len(tries))
        assert choose(shuffled, config, (1, 2, 3, number)) == first
        assert all(each in tries and each.searched for each in first)
        assert all(each.scores["ap"] < 1 for each in first)
        differ += choose(tries, config, (1, 3, 3, number)) != first
    assert (differ > 20) == (choice == "weighted")


def test_mixed_tries_are_refused() -> None:
    with pytest.raises(ValueError, match="questions or hops"):
        choose([made("a", 0.5), made("b", 0.5, hop=2)], GREEDY, ())
    several_states = [made("a", 0.25), made("b", 0.5, state=1)]
    assert [each.query for each in choose(several_states, GREEDY, ())] == ["b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choice": "best"}, r"config.next_state.choice"),
        ({"count": 0}, r"config.next_state.count"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NextStatesConfig(**fields)


def test_a_draw_is_uniform() -> None:
    draws = np.array([uniform("test", (3, number)) for number in range(4000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, 20, (0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 44  # chi-squared, 19 degrees: 0.1 %


def test_a_draw_depends_on_each_part_alone() -> None:
    assert uniform("test", (1, 2)) == 0.9187313531666456
    others = [
        uniform("test", (2, 1)),
        uniform("test", (12,)),
        uniform("test", (1, 2, 0)),
        uniform("other", (1, 2)),
    ]
    assert len({uniform("test", (1, 2)), *others}) == 5

from __future__ import annotations

import json

import pytest

from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs_report import PairsReport, check_found, check_pairs, report_of
from qrag_jax.feedback.preference_pairs import PairsConfig, pairs_of
from tests.feedback.tries_maker import state

LERET = PairsConfig()


def report(*rewards: tuple[float | None, ...], config: PairsConfig = LERET) -> PairsReport:
    """Of states whose tries have these rewards, each by the next prompt."""
    return report_of([pairs_of(state(*zip("abcd", each)), config) for each in rewards])


def test_what_is_counted() -> None:
    """Two states with pairs, one tie of each kind, and one state whose tries all failed."""
    found = report((0.0, 0.5, 0.25), (0.5, 0.0), (1.0, 1.0), (0.0, 0.0), (0.5, None), (None, None))
    assert found.states == {
        "paired": 2,
        "all_solved": 1,
        "all_zero": 1,
        "tied": 1,
        "unpaired": 0,
        "unscored": 1,
    }
    assert found.total == 6
    assert found.share("all_solved", "all_zero", "tied") == 0.5
    assert (found.pairs, found.targets, found.degenerate) == (3, 2, 0)
    assert found.queries == pytest.approx((3 + 2 + 2 + 2 + 1) / 5)
    assert found.levels == pytest.approx((3 + 2 + 1 + 1 + 1) / 5)
    assert found.wins == {0: 1, 1: 1, 2: 1}
    assert found.best == {0: 1, 1: 1}


def test_a_query_of_two_prompts_wins_for_both() -> None:
    found = report_of([pairs_of(state(("a", 0.5), ("b", 0.0), ("A", 0.5)), LERET)])
    assert (found.pairs, found.wins, found.best) == (1, {0: 1, 2: 1}, {0: 1, 2: 1})


def test_the_report_as_json() -> None:
    told = json.loads(json.dumps(report((0.0, 0.5), (1.0, 1.0)).to_json()))
    assert told["shares"]["paired"] == told["shares"]["all_solved"] == told["all_ties"] == 0.5
    assert told["wins"] == {"1": 1}
    assert told["states"]["unscored"] == 0


def test_no_states() -> None:
    found = report()
    assert (found.total, found.queries, found.share("paired")) == (0, 0.0, 0.0)
    with pytest.raises(InputError, match="none of the 0 states has a try with a score"):
        check_pairs(found)


def test_one_pair_is_enough() -> None:
    check_pairs(report((0.0, 0.5), (1.0, 1.0)))


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (
            [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0)],
            [
                "no state of 4 has pairs: in 100% all tries are worth the same",
                "75% found every gold page, 25% none, 0% some",
                "take more prompts, a higher config.sampling.temperature, more samples of each "
                "prompt, or harder questions",
            ],
        ),
        (
            [(0.0, 0.0), (0.5, 0.5), (0.0, 0.0), (None, None)],
            ["in 75% all tries", "0% found every gold page, 50% none, 25% some", "or easier"],
        ),
    ],
)
def test_ties_everywhere_are_refused(
    rewards: list[tuple[float | None, ...]], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        check_pairs(report(*rewards))
    for each in words:
        assert each in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tries_that_all_failed_are_refused() -> None:
    with pytest.raises(InputError, match="none of the 2 states has a try with a score"):
        check_pairs(report((None, None), (None,)))


def test_a_gap_that_no_pair_has_is_told() -> None:
    with pytest.raises(InputError, match=r"config\.pairs\.least_gap"):
        check_pairs(report((0.0, 0.5), (0.5, 1.0), config=PairsConfig(least_gap=0.9)))


def test_tries_none_of_which_found_a_gold_page_are_refused() -> None:
    nothing = state(("a", 0.0), ("b", 0.0), ("c", None))
    with pytest.raises(InputError) as caught:
        check_found(nothing)
    told = str(caught.value)
    assert told.startswith("none of 2 tries with a score found a gold page, so every score is 0")
    assert "config.search.index" in told
    assert "\n" not in told
    check_found([*nothing, *state(("d", 0.5))])
    check_found(state(("a", None)))  # what failed says nothing of the corpus
    check_found([])

"""What a rewritten query is worth, by hand and by trec_eval; guards that show and stop hacks."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from functools import partial
from typing import Any

import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import Document
from qrag_jax.environments.queries import (
    NO_QUERY,
    REWRITE_OUTCOMES,
    REWRITTEN,
    UNREADABLE,
    Searched,
)
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewrite import (
    GUARD_MEASURES,
    MEASURES,
    TIERS,
    GuardsConfig,
    RewriteReward,
    RewriteRewardConfig,
    beyond_limits,
    entries_of,
    guard_measures,
)

TASK = Sample("q", "capital of Norway", answers=("Oslo",), grades=(("a", 2), ("b", 1)))


def documents(*ids: str) -> tuple[Document, ...]:
    """Their texts are their ids."""
    return tuple(Document(item, "", item, False) for item in ids)


FOUND = documents("x", "b", "a")
written = partial(Searched, outcome=REWRITTEN)


def reward(measure: str = "ndcg", **fields: Any) -> RewriteReward:
    return RewriteReward(RewriteRewardConfig(measure, **fields))


def test_gain_by_hand() -> None:
    item = reward("recall", k=2)
    ended = written("Oslo  city", found=FOUND)
    parts = {"recall@2": 0.5, "gain": 0.5, "format": 1.0, "words": 2.0}
    assert item.of(TASK, ended, 0.0) == {"reward": 0.5, **parts}
    assert item.of(TASK, ended, 1.0)["reward"] == -0.5
    plain = reward("recall", k=2, gain=False).of(TASK, ended, 1.0)
    assert (plain["reward"], plain["gain"], plain["recall@2"]) == (0.5, -0.5, 0.5)
    long = item.of(TASK, written("x " * 99, found=FOUND), 0.25)
    assert (long["reward"], long["words"]) == (0.25, 99.0)  # length is free


def test_the_cost_of_reading_by_hand() -> None:
    """Of the question's words the index has 3 + 2 + 1 entries, each word once."""
    entries = {"": entries_of(("What is it?", "what, WHAT is", "what of Norway", "Oslo"))}
    item = RewriteReward(RewriteRewardConfig("recall", k=2, reading_cost=0.6), entries)
    task = dataclasses.replace(TASK, question="What is what, of what?")
    for query, share in (("what is what", 5 / 6), ("Norway Oslo", 2 / 6), ("unknown", 0.0)):
        parts = item.of(task, written(query, found=FOUND), 0.2)
        assert parts["read_share"] == pytest.approx(share)
        assert parts["reward"] == pytest.approx(parts["gain"] - 0.6 * share)
    nothing = written("", outcome=NO_QUERY)
    assert item.of(task, nothing, 0.2)["reward"] == pytest.approx(-0.2 - 0.6)
    unknown = dataclasses.replace(TASK, question="unknown")  # the original reads nothing
    assert item.of(unknown, written("what", found=FOUND), 0.2)["read_share"] == 1.0


@pytest.mark.parametrize("measure", MEASURES)
def test_an_echo_earns_nothing_and_no_query_is_worth_an_empty_result(measure: str) -> None:
    item = reward(measure, k=7)
    original = item.measure(TASK, FOUND)
    assert item.of(TASK, written(TASK.question, found=FOUND), original)["reward"] == 0.0
    for outcome in {*REWRITE_OUTCOMES} - {REWRITTEN}:
        ended = written("(Oslo" if outcome == UNREADABLE else "", outcome=outcome)
        gained = item.of(TASK, ended, 0.75)
        assert gained["reward"] == gained["gain"] == -0.75
        assert gained["format"] == gained["words"] == (outcome == UNREADABLE)
        assert reward(measure, gain=False).of(TASK, ended, 0.75)["reward"] == 0.0


def test_refused_settings_and_queries() -> None:
    for field in ({"tiers": "ir"}, {"tiers": "engines", "gain": False}):
        with pytest.raises(InputError, match=r"config\.reward\."):
            RewriteRewardConfig(**field)
    with pytest.raises(InputError, match="reading_cost"):
        RewriteRewardConfig(tiers="ir", gain=False, reading_cost=0.1)
    with pytest.raises(InputError, match=r"config\.reward\.measure"):
        reward("answer_rank").check(dataclasses.replace(TASK, answers=("the",)))
    reward("answer_rank").check(TASK)


# ---------------------------------------------------------------- DeepRetrieval's tiers


def tier(tiers: str, value: float, query: str = "x", *, readable: bool = True) -> float:
    return TIERS[tiers][1](query, readable, value)


def test_tiers_number_by_number() -> None:
    by_recall = ((0.7, 5), (0.5, 4), (0.4, 3), (0.3, 1), (0.1, 0.5), (0.05, 0.1), (0.0, -3.5))
    for (recall, worth), (_, below) in itertools.pairwise(by_recall):
        assert tier("engines", recall) == 1 + worth
        assert tier("engines", recall - 1e-5) == 1 + below
    by_place = ((5, 5), (20, 4), (50, 2), (100, 1), (1000, 0.5), (3000, 0.1), (3001, -3.5))
    for (place, worth), (_, after) in itertools.pairwise(by_place):  # told as its reciprocal
        assert tier("qa", 1 / place) == 1 + worth
        assert tier("qa", 1 / (place + 1)) == 1 + after
    assert tier("qa", 0.0) == -2.5
    # The preset's measure is reported without a format.
    item = reward(TIERS["engines"][0], k=3000, gain=False, tiers="engines")
    parts = item.of(TASK, written("x", found=documents("a", "x")), 0.5)
    assert (parts["reward"], parts["gain"]) == (5.0, parts[item.config.name] - 0.5)
    assert (tier("ir", 0.25), tier("ir", 1e-9), tier("ir", 0.0)) == pytest.approx((0.35, 0.1, 0.0))
    # Without a query there is the format alone; a query that the search cannot read.
    for name, none, unreadable in (("engines", -4, -3), ("qa", -4, -3), ("ir", -2, 0)):
        assert tier(name, 0.0, "", readable=False) == none
        assert tier(name, 0.0, "(x", readable=False) == unreadable


# ---------------------------------------------------------------- guards

ORIGINAL = "Which river flows through Ada Berg's birthplace?"
ANSWERS = ("the Akerselva", "Aker River")


def test_guard_measures_by_hand() -> None:
    choice = "Is the Akerselva or the Glomma longer?"
    for original, query, leaks, echo in (
        (ORIGINAL, "an AKERSELVA!", 1.0, 0.0),
        (ORIGINAL, "(aker-river) OR x", 1.0, 0.0),
        (ORIGINAL, "Akerselvas", 0.0, 0.0),
        (choice, "Akerselva length", 0.0, 0.0),  # it is in the question
        (ORIGINAL, "“which RIVER”  flows through Ada Ｂerg's birthplace!", 0.0, 1.0),
        (ORIGINAL, "river flows which through Ada Berg's birthplace", 0.0, 0.0),
    ):
        found = guard_measures(original, query, ANSWERS)
        assert (found["answer_in_query"], found["echo"]) == (leaks, echo), query
    # Operators and fields are no words.
    query = '(tumor[tiab] OR "breast cancer"[Title/Abstract:~2]) OR (chemo[tiab] AND NOT child)'
    found = guard_measures("cancer or tumor", query, ())
    assert (found["repetition"], found["kept_words"]) == (0.0, pytest.approx(2 / 3))
    assert (found["new_words"], found["query_words"]) == (3 / 5, 9.0)
    assert guard_measures("x", "or or", ())["repetition"] == 0.5  # these are words
    none = guard_measures("?", "", ("Oslo",))
    assert none == dict.fromkeys(GUARD_MEASURES, 0.0) | {"kept_words": 1.0}


def test_a_limit_counts_updates_in_a_row() -> None:
    """What was not measured neither counts nor ends a row."""
    beyond, nothing = Counter[str](), math.nan
    config = GuardsConfig(max_words=9, min_entropy=0.5, patience=2)
    steps = ((12, 0.2), (nothing, 0.8), (12, 0.2), (12, 0.2), (12, 0.8), (3, 0.8))
    output = [
        beyond_limits(config, beyond, {"query_words": words, "entropy": entropy})
        for words, entropy in steps
    ]
    assert [place for place, text in enumerate(output) if "query_words" in text] == [2, 4]
    assert [place for place, text in enumerate(output) if "entropy" in text] == [3]

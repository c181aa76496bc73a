"""What a rewritten query is worth, by hand and by trec_eval, and what is told beside it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from qrag_jax.environments.query_rewriting.output import (
    BROKEN,
    NO_QUERY,
    OUTCOMES,
    REWRITTEN,
    UNREADABLE,
)
from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Document
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewrite_reward import MEASURES, Entries, RewriteReward, RewriteRewardConfig
from qrag_jax.feedback.rewrite_tiers import TIERS
from qrag_jax.metrics.ranking import ranking_columns

TASK = RewriteTask.judged("q", "capital of Norway", {"a": 2, "b": 1}, answers=("Oslo",))


def documents(*ids: str) -> tuple[Document, ...]:
    """Their texts are their ids."""
    return tuple(Document(each, "", each, False) for each in ids)


def reward(measure: str = "ndcg", **fields: Any) -> RewriteReward:
    return RewriteReward(RewriteRewardConfig(measure, **fields))


def test_gain_by_hand() -> None:
    each = reward("recall", k=2)
    ended = Rewritten("Oslo  city", found=documents("x", "b", "a"))
    assert each.of(TASK, ended, 0.0) == {
        "reward": 0.5,
        "recall@2": 0.5,
        "gain": 0.5,
        "format": 1.0,
        "words": 2.0,
    }
    assert each.of(TASK, ended, 1.0)["reward"] == -0.5
    plain = reward("recall", k=2, gain=False).of(TASK, ended, 1.0)
    assert (plain["reward"], plain["gain"], plain["recall@2"]) == (0.5, -0.5, 0.5)


def test_the_cost_of_length_by_hand() -> None:
    each, free = reward("recall", k=2, length_cost=0.3), reward("recall", k=2)
    found = documents("x", "b", "a")
    for query, cost in (("Oslo", 0.1), ("capital of Norway", 0.3), ("a b c d e f", 0.6)):
        ended = Rewritten(query, found=found)
        paid, given = each.of(TASK, ended, 0.2), free.of(TASK, ended, 0.2)
        assert paid.pop("reward") == pytest.approx(given.pop("reward") - cost)
        assert paid == given  # nothing else knows of it
    nothing = Rewritten("", outcome=NO_QUERY)
    assert each.of(TASK, nothing, 0.2)["reward"] == pytest.approx(-0.2 - 0.3)


def test_the_cost_of_reading_by_hand() -> None:
    """Of the question's words the index has 3 + 2 + 1 entries, each word once."""
    texts = ("What is it?", "what, WHAT is", "what of Norway", "Oslo")
    free = reward("recall", k=2)
    each = RewriteReward(
        RewriteRewardConfig(measure="recall", k=2, reading_cost=0.6), {"": Entries.of(texts)}
    )
    task = dataclasses.replace(TASK, question="What is what, of what?")
    found = documents("x", "b", "a")
    for query, share in (("what is what", 5 / 6), ("Norway Oslo", 2 / 6), ("unknown", 0.0)):
        ended = Rewritten(query, found=found)
        paid, given = each.of(task, ended, 0.2), free.of(task, ended, 0.2)
        assert paid.pop("read_share") == pytest.approx(share)
        assert paid.pop("reward") == pytest.approx(given.pop("reward") - 0.6 * share)
        assert paid == given  # nothing else knows of it
        assert {*paid, "read_share", "reward"} == {*each.names}
    nothing = Rewritten("", outcome=NO_QUERY)
    assert each.of(task, nothing, 0.2)["reward"] == pytest.approx(-0.2 - 0.6)
    unknown = dataclasses.replace(TASK, question="unknown")  # the original reads nothing
    assert each.of(unknown, Rewritten("what", found=found), 0.2)["read_share"] == 1.0


@pytest.mark.parametrize("measure", MEASURES)
def test_an_echo_earns_exactly_nothing(measure: str) -> None:
    each, draw = reward(measure, k=7), random.Random(0)
    pool = ["a", "b", "Oslo", *(f"x{number}" for number in range(7))]
    for _ in range(50):
        found = documents(*draw.sample(pool, draw.randint(0, 10)))
        original = each.measure(TASK, found)
        ended = Rewritten(TASK.question, found=found)
        assert each.of(TASK, ended, original)["reward"] == 0.0


@pytest.mark.parametrize("measure", ["ndcg", "recall", "rr"])
def test_the_measure_is_what_its_name_says(measure: str) -> None:
    draw, each = random.Random(1), reward(measure, k=5, gain=False)
    names = [f"d{number}" for number in range(12)]
    for number in range(40):
        qrel = {name: draw.randint(-1, 3) for name in draw.sample(names, 6)} | {"sure": 1}
        task = RewriteTask.judged(str(number), "?", qrel)
        ids = draw.sample([*names, "sure"], 9)
        parts = each.of(task, Rewritten("x", found=documents(*ids)), 0.0)
        name = f"{measure}@5"
        assert each.names == tuple(parts) == ("reward", name, "gain", "format", "words")
        (score,) = ranking_columns({"q": ids}, {"q": qrel}, [name])[name].values()
        assert parts["reward"] == parts[name] == pytest.approx(score, rel=0, abs=1e-9)


def test_the_place_of_an_answer() -> None:
    each = reward("answer_rank", k=3, gain=False)
    answered = RewriteTask("q", "?", ("Oslo", "Kristiania"))

    def told(*ids: str) -> dict[str, float]:
        return each.of(answered, Rewritten("x", found=documents(*ids)), 0.0)

    assert told("x", "in oslo!", "Kristiania")["answer_rr@3"] == 1 / 2
    assert told("Kristiania")["reward"] == 1.0
    assert told("x", "y", "z", "Oslo")["reward"] == 0.0  # beyond k


@pytest.mark.parametrize("outcome", sorted({*OUTCOMES} - {REWRITTEN}))
@pytest.mark.parametrize("measure", MEASURES)
def test_without_a_query_as_if_nothing_was_found(measure: str, outcome: str) -> None:
    """Nothing is worth less than it, and it is worth no more than a search that finds nothing."""
    answer = "(Oslo" if outcome == UNREADABLE else ""
    ended = Rewritten(answer, outcome=outcome)
    gained = reward(measure).of(TASK, ended, 0.75)
    assert gained["reward"] == gained["gain"] == -0.75
    assert gained["format"] == gained["words"] == (outcome == UNREADABLE)
    assert reward(measure, gain=False).of(TASK, ended, 0.75)["reward"] == 0.0
    nothing = reward(measure).of(TASK, Rewritten("Venus"), 0.75)
    assert nothing["reward"] == gained["reward"]
    assert nothing["format"] == nothing["words"] == 1.0


def test_format_and_length_are_in_no_reward_of_ours() -> None:
    each = reward("recall")
    found = documents("a")
    short, long = (each.of(TASK, Rewritten(query, found=found), 0.25) for query in ("x", "x " * 99))
    assert short["reward"] == long["reward"] == 0.25
    assert (short["words"], long["words"]) == (1.0, 99.0)


@pytest.mark.parametrize(
    ("tiers", "found", "query", "worth"),
    [
        ("engines", ("a", "x"), "x", 5.0),
        ("engines", (), "x", -2.5),
        ("qa", ("x",) * 5 + ("Oslo",), "x", 5.0),
        ("ir", ("a", "b"), "x", 1.1),
        ("ir", (), "x", 0.0),
        ("remake", ("a", "x"), "(a b c) AND (d e)", 0.4 + 0.2),
    ],
)
def test_presets(tiers: str, found: tuple[str, ...], query: str, worth: float) -> None:
    each = reward(TIERS[tiers].measure, k=3000, gain=False, tiers=tiers)
    parts = each.of(TASK, Rewritten(query, found=documents(*found)), 0.5)
    assert parts["reward"] == pytest.approx(worth)
    # What is reported as a measure is the measure, without a format.
    assert 0 <= parts[each.config.name] <= 1
    assert parts["gain"] == parts[each.config.name] - 0.5


@pytest.mark.parametrize(
    ("tiers", "none", "unreadable"),
    [("engines", -4, -3), ("qa", -4, -3), ("ir", -2, 0), ("remake", 0, 0.06)],
)
def test_presets_without_a_query(tiers: str, none: float, unreadable: float) -> None:
    each = reward(TIERS[tiers].measure, gain=False, tiers=tiers)
    for outcome in (NO_QUERY, BROKEN):
        assert each.of(TASK, Rewritten("", outcome=outcome), 0.5)["reward"] == none
    ended = Rewritten("(a OR", outcome=UNREADABLE)
    assert each.of(TASK, ended, 0.5)["reward"] == unreadable


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"measure": "mrr"}, r"config.reward.measure"),
        ({"k": 0}, r"config.reward.k"),
        ({"tiers": "bm25"}, r"config.reward.tiers"),
        ({"tiers": "ir", "gain": False, "length_cost": 0.1}, "length_cost"),
        ({"tiers": "ir", "gain": False, "reading_cost": 0.1}, "reading_cost"),
        ({"length_cost": -0.1}, "config.reward.length_cost is -0.1"),
        ({"reading_cost": -0.1}, "config.reward.reading_cost is -0.1"),
        ({"tiers": "ir"}, r"config.reward.tiers"),
        (
            {"tiers": "engines", "gain": False},
            r"config.reward.measure",
        ),
    ],
)
def test_a_reward_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RewriteRewardConfig(**fields)


def test_a_task_that_cannot_be_rewarded_is_refused() -> None:
    for answers in ((), ("the", "?")):
        task = dataclasses.replace(TASK, answers=answers)
        with pytest.raises(InputError, match=r"config\.reward\.measure"):
            reward("answer_rank").of(task, Rewritten("x"), 0.0)
    for measure in ("ndcg", "recall", "rr"):
        task = RewriteTask("q", "?", ("Oslo",))
        with pytest.raises(InputError, match="relevant document"):
            reward(measure).check(task)
        reward(measure).check(TASK)
    with pytest.raises(ValueError, match="a measure is in"):
        reward().of(TASK, Rewritten("x"), float("nan"))

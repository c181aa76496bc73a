"""Guards: planted hacks are shown, each by its measure, and a run that goes on goes on exactly."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.feedback.rewrite_guards import GUARD_MEASURES, Guards, GuardsConfig, guard_measures

ORIGINAL = "Which river flows through Ada Berg's birthplace?"
ANSWERS = ("the Akerselva", "Aker River")


def test_measures_by_hand() -> None:
    found = guard_measures("capital of Norway", "Norway capital city Norway", ("Oslo",))
    assert tuple(found) == GUARD_MEASURES
    assert found == pytest.approx(
        {
            "answer_in_query": 0.0,
            "repetition": 1 / 4,
            "kept_words": 2 / 3,
            "new_words": 1 / 4,
            "query_words": 4.0,
            "echo": 0.0,
        }
    )


@pytest.mark.parametrize(
    ("query", "leaks"),
    [
        (ORIGINAL, 0.0),
        ("river Akerselva", 1.0),
        ("an AKERSELVA!", 1.0),
        ("(aker-river) OR x", 1.0),
        ("Oslo Aker River", 1.0),
        ("Akerselvas", 0.0),
    ],
)
def test_an_answer_in_the_query(query: str, leaks: float) -> None:
    assert guard_measures(ORIGINAL, query, ANSWERS)["answer_in_query"] == leaks


def test_an_answer_that_the_original_has_is_no_leak() -> None:
    choice = "Is the Akerselva or the Glomma longer?"
    assert guard_measures(choice, "Akerselva length", ANSWERS)["answer_in_query"] == 0.0
    assert guard_measures(choice, "Aker River length", ANSWERS)["answer_in_query"] == 1.0
    assert guard_measures(choice, "Akerselva", ())["answer_in_query"] == 0.0


@pytest.mark.parametrize(
    ("query", "echo"),
    [
        ("which RIVER flows through Ada Berg's birthplace", 1.0),
        ("Which river flows through Ada Berg birthplace", 1.0),
        ("“Which river”  flows through Ada Ｂerg's birthplace!", 1.0),
        ("river flows which through Ada Berg's birthplace", 0.0),
        ("Which river AND flows through Ada Berg's birthplace", 0.0),
        ("", 0.0),
    ],
)
def test_an_echo(query: str, echo: float) -> None:
    assert guard_measures(ORIGINAL, query, ())["echo"] == echo


def test_operators_and_fields_are_no_words() -> None:
    query = '(tumor[tiab] OR "breast cancer"[Title/Abstract:~2]) OR (chemo[tiab] AND NOT child)'
    found = guard_measures("cancer or tumor", query, ())
    assert (found["repetition"], found["kept_words"]) == (0.0, pytest.approx(2 / 3))
    assert (found["new_words"], found["query_words"]) == (3 / 5, 9.0)
    # In brackets of their own they are words, and so are words that look like operators.
    assert guard_measures("x", "[tiab] [tiab]", ())["repetition"] == 0.5
    assert guard_measures("x", "or or", ())["repetition"] == 0.5


def test_texts_without_words() -> None:
    none = guard_measures("?", "", ("Oslo",))
    assert none == dict.fromkeys(GUARD_MEASURES, 0.0) | {"kept_words": 1.0}
    assert guard_measures("?!", "?!", ())["echo"] == 1.0
    assert guard_measures("?!", "!", ())["echo"] == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_measures_by_definition(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        before = draw.choices("abcdef", k=draw.randint(1, 8))
        after = draw.choices("abcdefgh", k=draw.randint(1, 8))
        found = guard_measures(" ".join(before), ", ".join(after).upper(), ("g",))
        repeats = [word for place, word in enumerate(after) if word in after[:place]]
        assert found == pytest.approx(
            {
                "answer_in_query": float("g" in after),
                "repetition": len(repeats) / len(after),
                "kept_words": len([each for each in before if each in after]) / len(before),
                "new_words": len([each for each in after if each not in before]) / len(after),
                "query_words": len(after),
                "echo": float(before == after),
            }
        )


# Policies that drift into a hack: the query of update n.
def grows(n: int) -> str:
    return " ".join(f"word{number}" for number in range(5 + 3 * n))


def repeats(n: int) -> str:
    return "river Oslo" + " river" * n


def remembers(n: int) -> str:
    return "river" + " Akerselva" * (n > 4)


def honest(n: int) -> str:
    return f"river Ada Berg birthplace city {n}"


def means(policy: Callable[[int], str], update: int) -> dict[str, float]:
    rows = [guard_measures(ORIGINAL, policy(update + each), ANSWERS) for each in range(3)]
    return {name: statistics.fmean(row[name] for row in rows) for name in GUARD_MEASURES}


@pytest.mark.parametrize(
    ("policy", "named", "other"),
    [
        (grows, "query_words", "repetition"),
        (repeats, "repetition", "answer_in_query"),
        (remembers, "answer_in_query", "repetition"),
    ],
)
def test_each_hack_is_shown_by_its_measure(
    policy: Callable[[int], str], named: str, other: str
) -> None:
    first, last = means(policy, 0), means(policy, 20)
    assert last[named] > first[named] + 0.25
    assert last[other] == first[other] == 0.0
    shown = dict(answer_in_query=0.0, repetition=0.0, query_words=6.0)
    assert means(honest, 20) == means(honest, 0)
    assert means(honest, 0).items() >= shown.items()


def test_planted_hacks_are_stopped() -> None:
    config = GuardsConfig(max_words=20, max_repetition=0.5, patience=3)

    def told(policy: Callable[[int], str]) -> list[tuple[int, str]]:
        guards = Guards(config)
        every = ((update, guards.look(means(policy, update))) for update in range(9))
        return [(update, said) for update, said in every if said is not None]

    # Means of 8 + 3 n words: above 20 from n = 5 on.
    assert told(grows) == [
        (
            7,
            "the length of queries (query_words) is 29 words and was above config.guards.max_words,"
            " 20, in the last 3 updates.",
        )
    ]
    (update, said), _ = told(repeats)
    assert update == 4
    assert "the share of repeated words (repetition) is 0.710317 and was above" in said
    assert "config.guards.max_repetition, 0.5, in the last 3 updates" in said
    assert told(honest) == told(remembers) == []


def test_the_policy_itself() -> None:
    guards = Guards(GuardsConfig(max_kl=0.3, min_entropy=0.5, patience=1))
    assert guards.look({"kl": 0.3, "entropy": 0.5}) is None
    assert guards.look({"kl": 0.412, "entropy": 0.5}) == (
        "the KL to the stage's first weights (kl) is 0.412 nats a token and was above "
        "config.guards.max_kl, 0.3, in the last update."
    )
    both = guards.look({"kl": math.inf, "entropy": 0.01})
    assert both is not None
    assert "config.guards.max_kl, 0.3" in both
    assert "(entropy) is 0.01 nats a token and was below config.guards.min_entropy, 0.5" in both


def test_without_limits_nothing_is_looked_at() -> None:
    config = GuardsConfig()
    assert config.metrics == ()
    assert Guards(config).look({}) is None
    limited = GuardsConfig(max_kl=1, max_repetition=0.5)
    assert limited.metrics == ("kl", "repetition")
    with pytest.raises(InputError, match=r"guards\.max_repetition"):
        Guards(limited).look({"kl": 0.0, "entropy": 1.0})


LIMITED = GuardsConfig(max_kl=0.5, min_entropy=0.5, max_words=0.5, max_repetition=0.5, patience=3)


def rows(seed: int) -> list[dict[str, float]]:
    draw = random.Random(seed)
    values = (0.2, 0.8, 0.9, math.nan)
    return [{name: draw.choice(values) for name in LIMITED.metrics} for _ in range(60)]


@pytest.mark.parametrize("seed", range(5))
def test_a_limit_counts_updates_in_a_row(seed: int) -> None:
    """Against groups of equal updates: each whole three of a row speak once."""
    guards, every = Guards(LIMITED), rows(seed)
    said = [guards.look(row) or "" for row in every]
    assert any(said)
    for name in LIMITED.metrics:
        measured = [(at, row[name]) for at, row in enumerate(every) if not math.isnan(row[name])]
        expected: set[int] = set()
        beyond = (lambda v: v < 0.5) if name == "entropy" else (lambda v: v > 0.5)
        for is_beyond, group in itertools.groupby(measured, key=lambda each: beyond(each[1])):
            if is_beyond:
                expected |= {at for at, _ in [*group][2::3]}
        assert {at for at, text in enumerate(said) if f"({name}) is" in text} == expected


@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_run_goes_on_exactly(seed: int) -> None:
    every = rows(seed)
    whole = Guards(LIMITED)
    said = [whole.look(row) for row in every]
    draw, guards, again = random.Random(seed), Guards(LIMITED), []
    for row in every:
        if draw.random() < 0.3:
            saved = json.dumps(guards.state())
            guards = Guards(LIMITED)
            guards.restore(json.loads(saved))
        again.append(guards.look(row))
    assert again == said
    assert guards.state() == whole.state()


def test_a_state_is_the_callers_own() -> None:
    guards = Guards(LIMITED)
    before = guards.state()
    guards.look(dict.fromkeys(LIMITED.metrics, 0.9))
    assert before == dict.fromkeys(LIMITED.metrics, 0)
    # Resumed with less patience, the row that was counted is long enough.
    guards.look(dict.fromkeys(LIMITED.metrics, 0.9))
    other = Guards(GuardsConfig(max_kl=0.5, patience=1))
    other.restore(guards.state())
    assert "in the last update" in (other.look({"kl": 0.9}) or "")
    for wrong in ({}, {**before, "kl": -1}, {**before, "kl": True}, {**before, "x": 0}):
        with pytest.raises(ValueError, match="count for each"):
            guards.restore(wrong)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_kl": -1.0}, r"config.guards.max_kl"),
        ({"min_entropy": math.nan}, "config.guards.min_entropy is nan"),
        ({"max_words": math.inf}, r"config.guards.max_words"),
        ({"max_repetition": 1.0}, r"config.guards.max_repetition"),
        ({"patience": 0}, r"config.guards.patience"),
        ({"action": "wait"}, r"config.guards.action"),
    ],
)
def test_guards_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GuardsConfig(**fields)

"""The answer metrics against pairs scored by hand and against slow versions of their own."""

from __future__ import annotations

import itertools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.generators import babi_stories
from qrag_jax.errors import InputError
from qrag_jax.metrics import answers
from qrag_jax.metrics.answers import BABILONG_LABELS, RULES, normalise, score

PAIRS = json.loads((Path(__file__).parent / "answer_pairs.json").read_text())["pairs"]
PUNCTUATION = r"""!"#$%&'()*+,-./:;<=>?@[\]^_`{|}~"""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["why"])
def test_recorded_pairs(pair: dict[str, Any]) -> None:
    for rule in pair["rules"]:
        sample_id = f"{pair.get('task', 'x')}-dev-1"
        got = score(rule, sample_id, pair.get("question", ""), pair["prediction"], pair["golds"])
        assert got.em == pair["em"], rule
        assert got.f1 == pytest.approx(float(Fraction(pair["f1"])), abs=1e-12), rule


def test_the_pairs_cover_every_rule_and_task() -> None:
    assert {rule for pair in PAIRS for rule in pair["rules"]} == set(RULES) - {"ruler"}
    assert {pair["task"] for pair in PAIRS if "task" in pair} == set(BABILONG_LABELS)


def slow_tokens(text: str) -> list[str]:
    """The tokens of the normal form, letter by letter."""
    words, word = [], ""
    for letter in text.lower() + " ":
        if letter in PUNCTUATION:
            continue
        if letter.isspace():
            words.append(word)
            word = ""
        else:
            word += letter
    return [word for word in words if word not in ("", "a", "an", "the")]


def slow_f1(said: list[str], gold: list[str]) -> Fraction:
    """Twice the shared tokens over all tokens, crossing them off one by one."""
    left, same = list(gold), 0
    for token in said:
        if token in left:
            left.remove(token)
            same += 1
    return Fraction(2 * same, len(said) + len(gold)) if same else Fraction(0)


def slow_score(rule: str, prediction: str, golds: list[str]) -> tuple[bool, Fraction]:
    said = slow_tokens(prediction)
    f1s = []
    for gold in map(slow_tokens, golds):
        f1 = slow_f1(said, gold)
        if rule == "musique" and not said and not gold:
            f1 = Fraction(1)
        if rule == "hotpotqa" and said != gold and any([w] in (said, gold) for w in WHOLE):
            f1 = Fraction(0)
        f1s.append(f1)
    return said in map(slow_tokens, golds), max(f1s)


WHOLE = ("yes", "no", "noanswer")
WORDS = ("yes", "No", "noanswer", "the", "A.", "an", "Köln", "u.s.", "1,000", "--", "old", "Old,")


def drawn_text(rng: random.Random) -> str:
    return rng.choice((" ", "  ", "\n")).join(rng.choices(WORDS, k=rng.randrange(0, 4)))


@pytest.mark.parametrize("rule", ["squad", "hotpotqa", "musique"])
def test_open_answers_equal_the_slow_version(rule: str) -> None:
    rng = random.Random(7)
    seen = set()
    for _ in range(3000):
        prediction = drawn_text(rng)
        golds = [drawn_text(rng) for _ in range(rng.randrange(1, 4))]
        em, f1 = slow_score(rule, prediction, golds)
        got = score(rule, "x", "", prediction, golds)
        assert got == (float(em), pytest.approx(float(f1), abs=1e-12)), (prediction, golds)
        seen.add((em, f1 == 0, f1 == 1))
    assert len(seen) >= 4  # right, half right and wrong answers were all drawn


def test_normal_form() -> None:
    assert normalise("  The Cat's-Paw, an  A-side\tof THEM. ") == "catspaw aside of them"
    for text in ("the", "A an the.", "?!", ""):
        assert normalise(text) == ""


@pytest.mark.parametrize("task", list(BABILONG_LABELS))
@pytest.mark.parametrize("world", [0, 1])
def test_babilong_answers_equal_the_slow_version(task: str, world: int) -> None:
    labels = sorted(BABILONG_LABELS[task][world])
    for gold, in_question in itertools.product(labels, [(), (0,), (1, 2)]):
        asked = [label for i in in_question if (label := labels[i]) != gold]
        question = f"What of {' and '.join(asked).title()}?"
        for said in itertools.chain([()], itertools.combinations(labels, 1), [(gold, labels[-1])]):
            prediction = f"It is {' or '.join(said).upper()}. And {labels[0]}"
            counted = {label for label in said if label not in asked}
            hit = gold in counted
            got = answers.babilong(prediction, [gold.title()], task, question)
            f1 = Fraction(2, 1 + len(counted)) if hit else 0
            assert got == (float(counted == {gold}), pytest.approx(float(f1)))


def test_babilong_knows_the_answers_of_our_own_stories() -> None:
    for task, (_, invented) in BABILONG_LABELS.items():
        told = babi_stories.generate(task, "dev", 60, seed=3)
        assert {story.answer.lower() for story in told} <= invented
    everybody = (*babi_stories.PEOPLE, *babi_stories.THINGS)
    assert BABILONG_LABELS["qa5"][1] == {name.lower() for name in everybody}
    assert BABILONG_LABELS["qa1"][1] == set(babi_stories.ROOMS)


def test_every_gold_label_scores_full_in_the_answer_template() -> None:
    for task in BABILONG_LABELS:
        for story in babi_stories.generate(task, "dev", 40, seed=5):
            said = f"{story.question.removesuffix('?')}: {story.answer}."
            assert answers.babilong(said, [story.answer], task, story.question) == (1.0, 1.0)


def test_rulers_string_match_counts_the_values_that_are_said() -> None:
    golds = ["4410", "Low-Tide", "99"]
    for said, scores in [
        ("They are 99, low-tide and 4410.", (1.0, 1.0)),
        ("4410 and 99", (0.0, 2 / 3)),
        ("the numbers 44101", (0.0, 1 / 3)),  # letters, not words
        ("4410 low tide", (0.0, 1 / 3)),
        ("", (0.0, 0.0)),
    ]:
        assert score("ruler", "x", "", said, golds) == pytest.approx(scores)


def test_refusals() -> None:
    for rule in ("squad", "hotpotqa", "musique", "ruler"):
        with pytest.raises(ValueError, match="least one gold"):
            score(rule, "x", "", "Paris", [])
    with pytest.raises(ValueError, match="least one gold"):
        score("babilong", "qa1-dev-1", "", "kitchen", [])
    with pytest.raises(InputError, match="'best'"):
        score("best", "x", "", "Paris", ["Paris"])
    with pytest.raises(InputError, match="'qa9'"):
        answers.babilong("yes", ["yes"], "qa9", "Is it?")
    with pytest.raises(InputError, match="'moon'"):
        answers.babilong("kitchen", ["moon"], "qa1", "Where is Mary?")


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("It is Oslo.", ["oslo"], 1),
        ("the U.S. Navy", ["Army", "US navy"], 1),
        ("party", ["art"], 1),
        ("Os", ["Oslo"], 0),  # the answer in the gold answer does not count
        ("", ["Oslo"], 0),
        ("the", ["Oslo"], 0),
        ("Oslo", ["the"], 0),  # no token is left of it
        ("", ["the"], 0),
    ],
)
def test_sub_em(prediction: str, golds: list[str], expected: float) -> None:
    assert answers.sub_em(prediction, golds) == expected


def test_sub_em_needs_a_gold_answer() -> None:
    with pytest.raises(ValueError, match="least one gold"):
        answers.sub_em("Oslo", [])

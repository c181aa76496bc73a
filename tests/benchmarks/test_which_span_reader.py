"""The script that answers by a span of what was read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.which_cases import span_reader
from benchmarks.which_cases.invented import Sizes
from benchmarks.which_cases.settings import TRAIN, TWO_WIKI, Asked, setting
from benchmarks.which_cases.span_reader import NAME, NUMBER, TIME, YEAR, answer
from qrag_jax.metrics import answers
from qrag_jax.retrieval.protocol import Passage
from tests.benchmarks import invented_setting
from tests.data import real_data


def passages(*texts: tuple[str, str]) -> list[Passage]:
    return [Passage(f"p{number}", text, title) for number, (title, text) in enumerate(texts)]


FILM = ("Grey Harbour (1951 film)", "Grey Harbour is a 1951 drama film directed by Ada Lund.")
OTHER_FILM = ("Red Mill", "Red Mill is a 1947 comedy film directed by Per Moe.")
LUND = (
    "Ada Lund",
    "Ada Lund (12 May 1903, in Bergen – 3 June 1988, in Oslo) was a Norwegian film director. She "
    "was the daughter of Nils Lund and Eva Dahl. She made 24 films.",
)
MOE = ("Per Moe", "Per Moe (born 2 July 1911 in Malmö) was a Swedish director who died in 1969.")
VALE = ("Vale", "Vale is a village in Hedmark, Norway.")
BIRK = ("Birk", "Birk is a village near Hamar, Norway.")
TARN = ("Tarn", "Tarn is a village near Paris, France.")
READ = passages(OTHER_FILM, FILM, LUND, MOE)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("When was the director of film Grey Harbour born?", "12 May 1903"),
        ("What is the date of death of the director of film Grey Harbour?", "3 June 1988"),
        ("What nationality is the director of film Grey Harbour?", "Norwegian"),
        ("Who is the mother of the director of film Grey Harbour?", "Eva Dahl"),
        ("Where was the director of film Grey Harbour born?", "Bergen"),
        ("Who is the father of the director of film Grey Harbour?", "Nils Lund"),
        ("What year was the film Red Mill made?", "1947"),
        ("How many films did Ada Lund make?", "24"),
    ],
)
def test_the_span_follows_from_the_question_and_the_second_hop(
    question: str, expected: str
) -> None:
    assert answer(question, READ) == expected


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (
            "Which film has the director born first, Red Mill or Grey Harbour?",
            "Grey Harbour",
        ),
        ("Which film has the director born later, Red Mill or Grey Harbour?", "Red Mill"),
        ("Which film has the director who died first, Red Mill or Grey Harbour?", "Red Mill"),
        ("Which film came out first, Grey Harbour or Red Mill?", "Red Mill"),
        ("Who is older, Per Moe or Ada Lund?", "Ada Lund"),
        ("Who was born first out of Per Moe and Ada Lund?", "Ada Lund"),
        ("Was Per Moe or Ada Lund born first?", "Ada Lund"),
        ("Which film came out first, Blue Sea or Red Mill?", "Red Mill"),  # one has a year
        ("Which film came out first, Blue Sea or White Sea?", "Blue Sea"),  # neither has
    ],
)
def test_alternatives_are_compared_by_their_years(question: str, expected: str) -> None:
    assert answer(question, READ) == expected


@pytest.mark.parametrize(
    ("question", "read", "expected"),
    [
        ("Are Vale and Birk located in the same country?", (VALE, FILM, BIRK), "yes"),
        ("Are Vale and Tarn located in the same country?", (VALE, FILM, TARN), "no"),
        ("Are Vale and Birk both in Norway?", (VALE, BIRK), "no"),  # the question's own name
        ("Are Vale and Birk located in the same country?", (VALE,), "no"),
        ("Are Vale and Birk located in the same country?", (), "no"),
    ],
)
def test_yes_is_a_name_that_two_passages_have_in_common(
    question: str, read: tuple[tuple[str, str], ...], expected: str
) -> None:
    assert answer(question, passages(*read)) == expected


def test_without_passages_there_is_no_span() -> None:
    assert answer("When was the director of film Grey Harbour born?", []) == ""
    assert answer("", READ[:1]) != answer("", [])
    assert answer("???", [Passage("p", "")]) == ""


def test_a_passage_without_a_title_is_not_what_the_question_names() -> None:
    untitled = ("", "Norway lies beside France.")
    question = "Are Vale and Tarn located in the same country?"
    assert answer(question, passages(untitled, VALE, TARN)) == "no"


def test_an_answer_is_not_taken_from_the_question() -> None:
    said = answer("Who is the director of Grey Harbour, like Per Moe?", READ)
    assert said not in ("Grey Harbour", "Per Moe")


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("In what year did it end?", YEAR),
        ("When is the performer's birthday?", TIME),
        ("How many acts does it have?", NUMBER),
        ("Where did she die?", NAME),
        ("Who wrote it?", NAME),
    ],
)
def test_the_question_tells_the_kind_of_its_answer(question: str, kind: str) -> None:
    assert span_reader.kind_of(question) == kind


def test_a_date_and_the_start_of_a_sentence_are_no_names() -> None:
    text = "It opened in May 1990. The Bay of Fundy."
    found = [each.text for each in span_reader.spans(text, NAME)]
    assert found == ["Bay of Fundy"]


def test_it_answers_invented_questions_by_their_gold_passages(tmp_path: Path) -> None:
    given = invented_setting.make(tmp_path, Sizes(test=40))
    by_name = {each.name: each for each in given.corpus}
    gold = [answer(each.text, [by_name[name] for name in each.gold]) for each in given.test]
    # Those of the next question are of another entity.
    turned = [*given.test[1:], given.test[0]]
    wrong = [
        answer(each.text, [by_name[name] for name in other.gold])
        for each, other in zip(given.test, turned, strict=True)
    ]
    assert matched(gold, given.test) > matched(wrong, given.test) + 0.1


def test_it_answers_real_questions_by_their_gold_passages(tmp_path: Path) -> None:
    """By the questions that its rules were chosen by; docs/which.md has those of the test."""
    data = real_data.real("2wikimultihopqa").parent
    given = setting(TWO_WIKI, data, tmp_path)
    by_name = {each.name: each for each in given.corpus}
    asked = given.questions[TRAIN]
    read = [answer(each.text, [by_name[name] for name in each.gold]) for each in asked]
    unread = [answer(each.text, []) for each in asked]
    assert matched(read, asked) > 0.7
    assert matched(unread, asked) < 0.35


def matched(said: Sequence[str], asked: Sequence[Asked]) -> float:
    pairs = zip(said, asked, strict=True)
    return float(np.mean([answers.hotpotqa(each, a.answers).em for each, a in pairs]))

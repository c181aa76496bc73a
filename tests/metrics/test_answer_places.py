"""Where an answer stands."""

from __future__ import annotations

import pytest

from qrag_jax.metrics.answer_places import answer_place, answer_places, has_answer, worded


def test_the_place_of_an_answer() -> None:
    texts = ["It was a party.", "# Oslo\nThe capital of Norway", "The U.S.A.\nis large", "art"]
    assert answer_place(texts, ["Oslo"]) == 2
    assert answer_place(texts, ["capital  of the Norway!"]) == 2
    assert answer_place(texts, ["USA", "Bergen"]) == 3
    assert answer_place(texts, ["USA", "oslo"]) == 2
    assert answer_place(texts, ["art"]) == 4  # as a word, not in "party"
    assert answer_place(texts, ["Bergen"]) == 0
    assert answer_place(texts, []) == answer_place([], ["Oslo"]) == 0
    assert answer_place(texts, ["the", "?"]) == 0  # they have no words
    assert has_answer(texts[1], ["norway"])
    assert not has_answer(texts[0], ["art"])


def test_all_places_of_answers() -> None:
    texts = ["In Oslo.", "A party", "oslo, the town", "Bergen"]
    assert answer_places(texts, ["Oslo", "Bergen"]) == [0, 2, 3]
    assert answer_places(texts, ["art"]) == answer_places(texts, []) == []
    assert answer_places(texts, ["the"]) == []


def test_answers_that_a_passage_can_hold() -> None:
    assert worded(["Yes", "no.", "Oslo", "the", "noanswer", "not yes"]) == ["Oslo", "not yes"]


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("She ruled twice (1962–1970).", "1962", True),
        ("She ruled twice (1962-1970).", "1970", True),
        ("She ruled twice (1962–1970).", "(1962—1970)", True),
        ("It is in “Oslo”…", "Oslo", True),
        ("Oslo’s port", "oslo", True),
        ("O’Brien’s", "O'Brien", True),
        ("in Oslo/Kristiania", "Kristiania", True),
        ("他住在北京市。", "北京", True),
        ("他住在Oslo市", "Oslo", True),
        ("他住在京北市", "北京", False),
        ("กรุงเทพมหานครเป็นเมืองหลวง", "กรุงเทพ", True),
        ("東京で生まれた", "東京", True),
        ("서울은 수도이다", "서울", True),
        ("१९४७ में दिल्ली।", "दिल्ली", True),
        ("१९४७ में दिल्ली।", "दिल", False),  # a word goes on over its marks
        ("Москва — столица", "МОСКВА", True),
        ("Московский", "Моск", False),
        ("Cafe\u0301 Noir", "CAFÉ", True),
        ("Straße 5", "STRASSE", True),
        ("１９６２年", "1962", True),
        ("13月", "3月", False),
        ("5,000 people", "5", False),
        ("5,000 people", "5000", True),
        ("3.5 km", "5", False),
        ("co\u00adoperation", "cooperation", True),
        ("He left", "eft", False),
    ],
)
def test_words_of_any_script(text: str, answer: str, found: bool) -> None:
    assert has_answer(text, [answer]) == found
    assert answer_places(["", text], [answer]) == [1] * found

"""Where an answer stands."""

from __future__ import annotations

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

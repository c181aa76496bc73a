"""The answer metrics: recorded pairs, places in texts."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from qrag_jax.metrics import answers
from qrag_jax.metrics.answers import answer_place, answer_places, has_answer, score, worded

PAIRS = json.loads((Path(__file__).parent / "answer_pairs.json").read_text())["pairs"]


def test_recorded_pairs() -> None:
    for pair in PAIRS:
        sample_id = f"{pair.get('task', 'x')}-dev-1"
        for rule in pair["rules"]:
            said, question = pair["prediction"], pair.get("question", "")
            got = score(rule, sample_id, question, said, pair["golds"])
            assert got.em == pair["em"], (rule, pair["why"])
            assert got.f1 == pytest.approx(float(Fraction(pair["f1"])), abs=1e-12), pair["why"]


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


def test_rouge_by_hand() -> None:
    pytest.importorskip("rouge_score", reason="the package rouge-score is not installed")
    for prediction, golds, expected in (
        ("The cat, sat!", ["the cat sat"], 1),
        ("sat the cat", ["the cat sat"], 2 / 3),  # a subsequence keeps the order
        ("running cats", ["run cat"], 1),  # stems
        ("dog", ["cat", "the dog", "dog"], 1),  # the best gold answer
        ("", ["cat"], 0),
        ("東京", ["東京"], 0),  # words are ASCII letters and digits
        ("x " * 64 + "cat", ["x " * 64 + "dog"], 1),  # cut at 128 characters
    ):
        assert answers.rouge_l(prediction, golds) == pytest.approx(expected)


def test_the_place_of_an_answer() -> None:
    texts = ["It was a party.", "# Oslo\nThe capital of Norway", "The U.S.A.\nis large", "art"]
    for answers_, place in (
        (["Oslo"], 2), (["capital  of the Norway!"], 2), (["USA", "Bergen"], 3),
        (["USA", "oslo"], 2),
        (["art"], 4),  # as a word, not in "party"
        (["Bergen"], 0), ([], 0), (["the", "?"], 0),  # which have no words
    ):  # fmt: skip
        assert answer_place(texts, answers_) == place
    texts = ["In Oslo.", "A party", "oslo, the town", "Bergen"]
    assert [*answer_places(texts, ["Oslo", "Bergen"])] == [0, 2, 3]
    # Answers that a passage can hold.
    assert worded(["Yes", "no.", "Oslo", "the", "noanswer", "not yes"]) == ["Oslo", "not yes"]


def test_words_of_any_script() -> None:
    for text, answer, found in (
        ("ruled twice (1962–1970).", "1970", True),
        ("She ruled twice (1962–1970).", "(1962—1970)", True),
        ("It is in “Oslo”…", "Oslo", True),
        ("Oslo’s port", "oslo", True),
        ("in Oslo/Kristiania", "Kristiania", True),
        *(("他住在北京市。", "北京", True), ("他住在京北市", "北京", False)),
        *(("他住在Oslo市", "Oslo", True), ("กรุงเทพมหานครเป็นเมืองหลวง", "กรุงเทพ", True)),
        ("서울은 수도이다", "서울", True),
        ("१९४७ में दिल्ली।", "दिल्ली", True),
        ("१९४७ में दिल्ली।", "दिल", False),  # a word goes on over its marks
        *(("Москва — столица", "МОСКВА", True), ("Московский", "Моск", False)),
        *(("Cafe\u0301 Noir", "CAFÉ", True), ("Straße 5", "STRASSE", True)),
        *(("１９６２年", "1962", True), ("13月", "3月", False), ("3.5 km", "5", False)),
        *(("5,000 people", "5", False), ("5,000 people", "5000", True)),
        *(("co\u00adoperation", "cooperation", True), ("He left", "eft", False)),
    ):
        assert has_answer(text, [answer]) == found, text
        assert [*answer_places(["", text], [answer])] == [1] * found


def test_sub_em() -> None:
    for prediction, golds, expected in (
        ("the U.S. Navy", ["Army", "US navy"], 1),
        ("party", ["art"], 1),
        ("Os", ["Oslo"], 0),  # the answer in the gold answer does not count
        ("the", ["Oslo"], 0),
        ("Oslo", ["the"], 0),  # no token is left of it
    ):
        assert answers.sub_em(prediction, golds) == expected

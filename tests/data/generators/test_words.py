"""Words of texts: sentences of corpora, dropped words, and names spelled otherwise."""

from __future__ import annotations

import math
import re

import pytest

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.data.generators.dropped_words import (
    STREAM,
    content_words,
    dropped,
    frequent_words,
    is_among,
    sentences_of,
    words_of,
)
from qrag_jax.data.generators.invented_names import Draw, invented_syllables, invented_word
from qrag_jax.data.generators.renamed import Renaming

SENTENCE = "the flow of a gas in a long pipe , as seen here ."


def every(text: str) -> list[str]:
    return list(sentences_of([text], 100, 1))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It rains. Is it wet? Yes!  So", ["It rains.", "Is it wet?", "Yes!", "So"]),
        ("one  flow .\ntwo flows .", ["one flow .", "two flows ."]),
        ('He said "it rains." (It did.) Then', ['He said "it rains."', "(It did.)", "Then"]),
        ("As J. Berg et al. show (e.g. in Fig. 3) it holds.",) * 2,
        ("It is 3.5 m long, i.e. short", ["It is 3.5 m long, i.e. short"]),
        ("Vitamin A? B! Type 2. End", ["Vitamin A?", "B!", "Type 2.", "End"]),
        ("", []),
        (" . ? ", []),
    ],
)
def test_where_sentences_end(text: str, sentences: list[str] | str) -> None:
    assert every(text) == ([sentences] if isinstance(sentences, str) else sentences)


def test_sentences_have_words_within_the_limits() -> None:
    texts = ["One. One two . One two three - ! One two three four", "a b"]
    assert list(sentences_of(texts, 3, 2)) == ["One two .", "One two three - !", "a b"]
    assert list(sentences_of(texts, 1, 1)) == ["One."]
    texts = ["One. Two two. Three. Four. Five.", "Six! Seven?"]  # neighbours together
    assert list(sentences_of(texts, 9, 1, 2)) == ["One. Two two.", "Three. Four.", "Six! Seven?"]
    assert list(sentences_of(texts, 2, 1, 2)) == ["Three. Four.", "Six! Seven?"]
    for limits in ((1, 2), (3, 0), (9, 1, 0)):
        with pytest.raises(ValueError, match="sentences"):
            list(sentences_of(texts, *limits))


def test_each_token_is_dropped_with_the_share() -> None:
    sentence, draws, share = " ".join(f"w{n}" for n in range(20)), 500, 0.25
    left = [dropped(sentence, Draw(0, STREAM, index), share).split() for index in range(draws)]
    sigma = math.sqrt(draws * share * (1 - share))
    for token in sentence.split():
        missing = sum(token not in each for each in left)
        assert abs(missing - draws * share) < 4 * sigma, token


def test_one_word_is_always_left() -> None:
    assert dropped(SENTENCE, Draw(0, STREAM, 0), 0.0) == SENTENCE
    left = [dropped("- a b , c .", Draw(0, STREAM, index), 1.0) for index in range(300)]
    assert set(left) == {"a", "b", "c"}
    assert all(60 < left.count(word) < 140 for word in "abc")
    assert left == [dropped("- a b , c .", Draw(0, STREAM, index), 1.0) for index in range(300)]
    for sentence, share in (("- .", 0.5), ("", 0.0), (SENTENCE, -0.1), (SENTENCE, math.nan)):
        with pytest.raises(ValueError, match=r"\w"):
            dropped(sentence, Draw(0, STREAM, 0), share)
    for index in range(200):
        kept = dropped(SENTENCE, Draw(1, STREAM, index), 0.8).split()
        tokens = iter(SENTENCE.split())
        assert all(token in tokens for token in kept)  # a part, in the same order
        assert re.search(r"\w", " ".join(kept))


def test_frequent_words_are_in_many_texts() -> None:
    texts = ["The flow, the pipe", "the gas", "A flow", "heat"]
    assert frequent_words(texts, 0.25) == {"the", "flow"}
    assert frequent_words(texts, 0.5) == frozenset()
    assert frequent_words([], 0.5) == frozenset()
    words = frozenset(("the", "of"))
    for token, frequent in (("The", True), ("(of", True), ("of/the", True), ("of/gas", False)):
        assert is_among(token, words) == frequent
    assert not is_among(".", words)


def test_only_what_may_be_dropped_is() -> None:
    kept = "flow gas long pipe , as seen here ."
    found = dropped(SENTENCE, Draw(0, STREAM, 0), 1.0, lambda t: t in ("the", "of", "a", "in"))
    assert found == kept
    # Whether a token may be dropped moves none of the draws of the others.
    whole, part = (
        dropped(SENTENCE, Draw(0, STREAM, 0), 0.5, may).split()
        for may in (lambda _: True, lambda each: each != "of")
    )
    assert [each for each in part if each != "of"] == [t for t in whole if t != "of"]


def test_words_stand_without_the_marks_around_them() -> None:
    text = "“Don't”, she said (again): well-known X, 3.5 % — o'er…"
    assert words_of(text) == ["Don't", "she", "said", "again", "well-known", "X", "3", "5", "o'er"]
    assert words_of(" ?! ") == []


def test_function_words_are_left_out_in_whatever_case() -> None:
    assert content_words("Which company IS the owner of The Sea?") == ["company", "owner", "Sea"]
    assert content_words("To be or not to be") == []


# Names spelled otherwise


WORLD = [bridge_question(0, "train", number) for number in range(60)]


def renaming(number: int = 0) -> Renaming:
    return Renaming(Draw(0, 5, number))


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("syllables", [2, 3])
def test_invented_words_are_told_by_their_spelling(split: int, syllables: int) -> None:
    draw = Draw(3, 0, syllables)
    words = [invented_word(draw, split, syllables) for _ in range(300)]
    assert {invented_syllables(word) for word in words} == {syllables}
    assert {invented_syllables(f"{word}q") for word in words} == {0}
    assert {*map(invented_syllables, ("Who", "Which", "Group", "She", "The", ""))} == {0}


def test_a_word_has_one_new_spelling_in_all_texts() -> None:
    draw, given = Draw(1, 0, 0), renaming()
    one, other = (invented_word(draw, 0, 2) for _ in range(2))
    first = given.of(f"Where does {one} {other} live?")
    new, newer = first.split()[2:4]
    assert first == f"Where does {new} {newer} live?"
    assert given.of(f"{other}, {one}.") == f"{newer}, {new}."
    assert len({one, other, new, newer}) == 4
    assert invented_syllables(new) == invented_syllables(newer) == 2


def test_only_invented_words_change_each_to_another() -> None:
    assert renaming(1).of(WORLD[0].question) == renaming(1).of(WORLD[0].question)
    assert renaming(1).of(WORLD[0].question) != renaming(2).of(WORLD[0].question)
    for text in (
        "",
        "Which river is longer, the River",
        "She keeps bees on Lake",
        "style: Lantern",
    ):
        assert renaming().of(text) == text
    for number, question in enumerate(WORLD):
        given = renaming(number)
        texts = (question.question, *(each.text for each in question.passages))
        pairs = [pair for text in texts for pair in zip(text.split(), given.of(text).split())]
        assert len({*pairs}) == len({one for one, _ in pairs}) == len({two for _, two in pairs})
        for name in question.entity.split():
            assert (given.of(name) != name) == (invented_syllables(name) > 0)


def test_new_names_are_of_the_training_split_alone() -> None:
    """So names of dev stay unseen: no word of one split is one of the other."""
    draw, given = Draw(9, 0, 0), renaming(3)
    old = {invented_word(draw, 0, 2) for _ in range(400)}
    new = {given.of(word) for word in old}
    dev = {invented_word(draw, 1, 2) for _ in range(20_000)}
    assert not new & dev
    # So that this can fail: the words of both splits are few enough to meet.
    train = {invented_word(draw, 0, 2) for _ in range(20_000)}
    assert new & train

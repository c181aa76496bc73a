"""Sentences of corpora, and what is left when words are dropped."""

from __future__ import annotations

import math
import re

import pytest

from qrag_jax.data.files.corpora import read_corpus
from qrag_jax.data.generators.dropped_words import (
    STREAM,
    content_words,
    dropped,
    frequent_words,
    is_among,
    sentences_of,
    words_of,
)
from qrag_jax.data.generators.invented_names import Draw
from qrag_jax.data.generators.invented_world import KINDS, RELATIONS
from tests.data.real_data import real

SENTENCE = "the flow of a gas in a long pipe , as seen here ."
GOLDEN = ["the gas long pipe , as .", "a gas in long pipe seen .", "of in a long , as seen"]


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
    for most, least in ((1, 2), (3, 0)):
        with pytest.raises(ValueError, match=f"no sentences of {least} to {most} words"):
            list(sentences_of(texts, most, least))


def test_neighbours_together_are_one_sentence() -> None:
    texts = ["One. Two two. Three. Four. Five.", "Six! Seven?"]
    assert list(sentences_of(texts, 9, 1, 2)) == ["One. Two two.", "Three. Four.", "Six! Seven?"]
    assert list(sentences_of(texts, 2, 1, 2)) == ["Three. Four.", "Six! Seven?"]
    assert list(sentences_of(texts, 9, 1, 5)) == ["One. Two two. Three. Four. Five."]
    with pytest.raises(ValueError, match="0 sentences"):
        list(sentences_of(texts, 9, 1, 0))


def test_golden_drops() -> None:
    found = [dropped(SENTENCE, Draw(0, STREAM, index), 0.5) for index in range(3)]
    assert found == GOLDEN
    assert found == [dropped(SENTENCE, Draw(0, STREAM, index), 0.5) for index in range(3)]


def test_what_is_left_is_a_part_in_the_same_order() -> None:
    for index in range(200):
        left = dropped(SENTENCE, Draw(1, STREAM, index), 0.8).split()
        tokens = iter(SENTENCE.split())
        assert all(token in tokens for token in left)  # takes from the iterator
        assert re.search(r"\w", " ".join(left))


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
    for sentence, share in (("- .", 0.5), ("", 0.0)):
        with pytest.raises(ValueError, match="has no word"):
            dropped(sentence, Draw(0, STREAM, 0), share)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="dropped with probability"):
            dropped(SENTENCE, Draw(0, STREAM, 0), share)


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


@pytest.mark.parametrize("name", ["scifact", "cranfield"])
def test_sentences_of_real_collections(name: str) -> None:
    texts = [read.document.text for read in read_corpus(real(f"ir/{name}"))][:300]
    sentences = list(sentences_of(texts, 25, 5))
    assert len(sentences) > 700
    joined = {" ".join(text.split()) for text in texts}
    for sentence in sentences[:50]:
        assert any(sentence in text for text in joined)
    ended = sum(sentence.endswith((".", "?", "!")) for sentence in sentences)
    assert ended >= 0.95 * len(sentences)


def test_words_stand_without_the_marks_around_them() -> None:
    text = "“Don't”, she said (again): well-known X, 3.5 % — o'er…"
    assert words_of(text) == ["Don't", "she", "said", "again", "well-known", "X", "3", "5", "o'er"]
    assert words_of(" ?! ") == []


def test_function_words_are_left_out_in_whatever_case() -> None:
    assert content_words("Which company IS the owner of The Sea?") == ["company", "owner", "Sea"]
    assert content_words("To be or not to be") == []


def test_every_relation_and_aside_of_the_world_keeps_a_word() -> None:
    for relation in RELATIONS:
        for question in relation.questions:
            assert content_words(question.format(x="")), question
    for kind in KINDS.values():
        assert all(map(content_words, kind.asides))

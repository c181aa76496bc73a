"""Sentences of corpora, and words dropped from them."""

from __future__ import annotations

import math
import re

from qrag_jax.data.scripted import Draw
from qrag_jax.data.words import (
    STREAM,
    content_words,
    dropped,
    frequent_words,
    is_among,
    sentences_of,
    words_of,
)

SENTENCE = "the flow of a gas in a long pipe , as seen here ."


def every(text: str) -> list[str]:
    return list(sentences_of([text], 100, 1))


def test_where_sentences_end() -> None:
    for text in (
        "It rains.|Is it wet?|Yes!|So",
        'He said "it rains."|(It did.)|Then',
        "As J. Berg et al. show (e.g. in Fig. 3) it holds.",
        "It is 3.5 m long, i.e. short",
        "Vitamin A?|B!|Type 2.|End",
    ):
        assert every(text.replace("|", "  ")) == text.split("|")
    texts = ["One. One two . One two three - ! One two three four", "a b"]
    assert list(sentences_of(texts, 3, 2)) == ["One two .", "One two three - !", "a b"]
    texts = ["One. Two two. Three. Four. Five.", "Six! Seven?"]  # neighbours together
    assert list(sentences_of(texts, 9, 1, 2)) == ["One. Two two.", "Three. Four.", "Six! Seven?"]
    text = "“Don't”, she said (again): well-known X, 3.5 % — o'er…"  # no marks around words
    assert words_of(text) == ["Don't", "she", "said", "again", "well-known", "X", "3", "5", "o'er"]


def test_one_word_is_always_left() -> None:
    assert dropped(SENTENCE, Draw(0, STREAM, 0), 0.0) == SENTENCE
    left = [dropped("- a b , c .", Draw(0, STREAM, index), 1.0) for index in range(300)]
    assert set(left) == {"a", "b", "c"}
    assert all(60 < left.count(word) < 140 for word in "abc")
    assert left == [dropped("- a b , c .", Draw(0, STREAM, index), 1.0) for index in range(300)]
    for index in range(200):
        kept = dropped(SENTENCE, Draw(1, STREAM, index), 0.8).split()
        tokens = iter(SENTENCE.split())
        assert all(token in tokens for token in kept)  # a part, in the same order
        assert re.search(r"\w", " ".join(kept))


def test_only_what_may_be_dropped_is_and_with_the_share() -> None:
    found = dropped(SENTENCE, Draw(0, STREAM, 0), 1.0, lambda t: t in ("the", "of", "a", "in"))
    assert found == "flow gas long pipe , as seen here ."
    # Whether a token may be dropped moves none of the draws of the others.
    whole, part = (
        dropped(SENTENCE, Draw(0, STREAM, 0), 0.5, may).split()
        for may in (lambda _: True, lambda each: each != "of")
    )
    assert [each for each in part if each != "of"] == [t for t in whole if t != "of"]
    left = [dropped(SENTENCE, Draw(0, STREAM, index), 0.25).split() for index in range(500)]
    missing = sum("pipe" not in each for each in left)
    assert abs(missing - 125) < 4 * math.sqrt(500 * 0.25 * 0.75)
    texts = ["The flow, the pipe", "the gas", "A flow", "heat"]
    assert frequent_words(texts, 0.25) == {"the", "flow"}
    words = frozenset(("the", "of"))
    for token, frequent in (("The", True), ("(of", True), ("of/the", True), ("of/gas", False)):
        assert is_among(token, words) == frequent


def test_function_words_are_left_out_in_whatever_case() -> None:
    assert content_words("Which company IS the owner of The Sea?") == ["company", "owner", "Sea"]
    assert content_words("To be or not to be") == []

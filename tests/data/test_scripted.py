"""Sentences of corpora, and words dropped from them."""

from __future__ import annotations

import re

from qrag_jax.data.scripted import STREAM, Draw, dropped, sentences_of, words_of

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

"""Pseudo-relevance expansion beside the definition, word by word."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from qrag_jax.data.generators.dropped_words import any_of
from qrag_jax.retrieval.bm25 import BM25Config, Words
from qrag_jax.retrieval.boolean_query import Or, parse_boolean
from qrag_jax.retrieval.feedback_terms import (
    TERMS,
    expanded,
    feedback_of,
    feedback_terms,
    passages_with,
)
from tests.retrieval.small_corpus import stored

PLAIN = BM25Config(stemmer="", stop_words="")
STEMMED = BM25Config()


def slowly(query: str, first: Sequence[str], corpus: Sequence[str], words: Words) -> list[str]:
    """The words of the first documents that the query lacks, the heaviest first, by definition."""
    weights = {}
    for word in {each for text in first for each in words(text)} - {*words(query)}:
        share = sum(words(text).count(word) / len(words(text)) for text in first if words(text))
        df = sum(word in words(text) for text in corpus)
        weights[word] = share * math.log((len(corpus) + 1) / (df + 0.5))
    # Weights that are equal but for rounding are ordered by the alphabet.
    return sorted(weights, key=lambda word: (-round(weights[word], 9), word))[:TERMS]


@pytest.mark.parametrize("config", [PLAIN, STEMMED])
def test_terms_are_those_of_the_definition(config: BM25Config, tmp_path: Path) -> None:
    draw = random.Random(3)
    known = [f"word{chr(97 + n)}s" for n in range(26)] + ["running", "runs", "the", "of", "cats"]
    heavy = range(1, len(known) + 1)
    texts = [" ".join(draw.choices(known, heavy, k=draw.randint(5, 40))) for _ in range(40)]
    corpus, words = stored(tmp_path, texts), Words(config)
    for place in range(0, 30, 3):
        query, first = " ".join(draw.sample(known, 3)), texts[place : place + 10]
        feedback = feedback_of(first, words)
        found = passages_with(corpus, {*feedback.weights}, config)
        terms = feedback_terms(query, feedback, found, len(corpus), words)
        assert [*map(words.word, terms)] == slowly(query, first, texts, words)
        assert all(any(term in text.split() for text in first) for term in terms)


def test_a_word_stands_in_its_commonest_form() -> None:
    words = Words(STEMMED)
    feedback = feedback_of(["cats run", "the cat runs, cats", "it runs"], words)
    assert feedback.forms == {"cat": "cats", "run": "runs"}
    assert feedback.weights == pytest.approx({"cat": 1 / 2 + 2 / 3, "run": 1 / 2 + 1 / 3 + 1})


def test_without_documents_there_are_no_terms(tmp_path: Path) -> None:
    words = Words(PLAIN)
    feedback = feedback_of([], words)
    assert feedback_terms("a cat", feedback, {}, 5, words) == []
    assert expanded("a  cat", []) == "a cat"


def test_the_original_keeps_its_weight() -> None:
    terms = [f"t{n}" for n in range(12)]
    assert expanded("two\nwords", terms).split() == ["two", "words"] * 18 + terms
    assert expanded("now five words are here", terms).split()[:-12] == (
        ["now", "five", "words", "are", "here"] * 8
    )
    long = " ".join(f"w{n}" for n in range(40))
    assert expanded(long, terms) == f"{long} {' '.join(terms)}"


def test_a_boolean_search_takes_any_of_the_words() -> None:
    query = expanded('cats AND (dogs NOT "well-known" AND cats', ["moon", "dogs"], boolean=True)
    assert query == "cats OR and OR dogs OR not OR well-known OR moon"
    assert isinstance(parse_boolean(query), Or)
    assert any_of("(", "?") == ""

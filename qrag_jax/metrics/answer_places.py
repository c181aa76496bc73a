"""Which texts have an answer in them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from qrag_jax.metrics.answers import normalise

_KEPT = 1 << 14  # normal forms of documents: many rewritings of one query find the same ones
WORDLESS = frozenset({"yes", "no", "noanswer"})  # answers that say nothing about a passage


def worded(answers: Iterable[str]) -> list[str]:
    """The answers that a passage can hold: they have words, and are not yes or no."""
    return [each for each in answers if normalise(each) not in WORDLESS | {""}]


def answer_place(texts: Iterable[str], answers: Iterable[str]) -> int:
    """Place, from 1, of the first text that has one of the answers in it; 0: none has.

    Text and answer are compared in SQuAD's normal form (`metrics.answers.normalise`), as whole
    words: "art" is not in "party". An answer without a word is in no text.
    """
    forms = [f" {form} " for form in map(normalise, answers) if form]
    for place, text in enumerate(texts if forms else (), 1):
        words = _words(text)
        if any(form in words for form in forms):
            return place
    return 0


def answer_places(texts: Iterable[str], answers: Iterable[str]) -> list[int]:
    """Indices, from 0, of all texts that have one of the answers in them; see `answer_place`."""
    forms = [f" {form} " for form in map(normalise, answers) if form]
    return [
        index for index, text in enumerate(texts) if any(form in _words(text) for form in forms)
    ]


def has_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether one of the answers is in the text; see `answer_place`."""
    return answer_place((text,), answers) == 1


@functools.lru_cache(_KEPT)
def _words(text: str) -> str:
    return f" {normalise(text)} "

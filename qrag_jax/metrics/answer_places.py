"""Which texts have an answer in them."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence

from qrag_jax.metrics.answers import normalise

_KEPT = 1 << 14  # forms of documents: many rewritings of one query find the same ones
WORDLESS = frozenset({"yes", "no", "noanswer"})  # answers that say nothing about a passage

_IN_NUMBER = re.compile(r"(?<=\d)[.,](?=\d)")
# Scripts written without blanks, and Hangul, whose particles follow a word without one.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Myanmar, Khmer
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # Kana, Han
    "\uac00-\ud7a3\U00020000-\U0003ffff]"  # Hangul, Han
)


class _Words(dict[int, "str | None"]):
    """For `str.translate`: what is no letter, mark or number parts words, on any script."""

    def __missing__(self, code: int) -> str | None:
        letter, kind = chr(code), unicodedata.category(chr(code))
        if kind == "Cf":  # soft hyphens and joiners
            self[code] = None
        elif _UNSPACED.match(letter):
            self[code] = f" {letter} "
        else:
            self[code] = letter if kind[0] in "LMN" else " "
        return self[code]


_WORDS = _Words()


def worded(answers: Iterable[str]) -> list[str]:
    """The answers that a passage can hold: they have words, and are not yes or no."""
    return [each for each in answers if normalise(each) not in WORDLESS | {""}]


def answer_place(texts: Iterable[str], answers: Iterable[str]) -> int:
    """Place, from 1, of the first text that has one of the answers in it; 0: none has.

    Whole words are compared: "art" is not in "party". Words are those of SQuAD's normal form, in
    which "U.S.A." is "USA", or those of Unicode, on which "(1962–1970)" has two; in scripts without
    blanks each letter is one. An answer without a word is in no text.
    """
    forms = _forms(answers)
    return next((place for place, text in enumerate(texts, 1) if _holds(text, forms)), 0)


def answer_places(texts: Iterable[str], answers: Iterable[str]) -> list[int]:
    """Indices, from 0, of all texts that have one of the answers in them; see `answer_place`."""
    forms = _forms(answers)
    return [index for index, text in enumerate(texts) if _holds(text, forms)]


def has_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether one of the answers is in the text; see `answer_place`."""
    return _holds(text, _forms(answers))


def _holds(text: str, forms: Sequence[str]) -> bool:
    return bool(forms) and any(form in _words(text) for form in forms)


def _forms(answers: Iterable[str]) -> list[str]:
    both = ((normalise(each), _unicode_words(each)) for each in answers)
    return [f" {form} " for forms in both for form in dict.fromkeys(forms) if form]


@functools.lru_cache(_KEPT)
def _words(text: str) -> str:
    return f" {normalise(text)} \n {_unicode_words(text)} "


def _unicode_words(text: str) -> str:
    bare = _IN_NUMBER.sub("", unicodedata.normalize("NFKC", text).casefold())
    words = unicodedata.normalize("NFC", bare).translate(_WORDS).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))

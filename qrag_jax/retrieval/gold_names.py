"""Finds passages of a corpus by their text, whatever their ids are."""

from __future__ import annotations

from collections.abc import Iterable

from qrag_jax.retrieval.protocol import Corpus

_AT_A_TIME = 10_000  # passages read


def names_of(corpus: Corpus, texts: Iterable[str]) -> dict[str, str]:
    """The ids of the passages that have these texts, by text; the others are left out.

    Data sets write one passage in several ways ("Title. Text", "Title Text"), so letters and digits
    alone are compared. Of passages with the same ones the first counts. All passages are read.
    """
    wanted: dict[str, list[str]] = {}
    for text in set(texts):
        wanted.setdefault(letters(text), []).append(text)
    found: dict[str, str] = {}
    for start in range(0, len(corpus), _AT_A_TIME):
        for passage in corpus.passages(range(start, min(start + _AT_A_TIME, len(corpus)))):
            for text in wanted.pop(letters(passage.whole), ()):
                found[text] = passage.name
        if not wanted:
            break
    return found


def letters(text: str) -> str:
    """The letters and digits of a text, without case."""
    return "".join(filter(str.isalnum, text.casefold()))

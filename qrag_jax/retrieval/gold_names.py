"""Finds passages of a corpus by their text, whatever their ids are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from qrag_jax.data.sample import Page
from qrag_jax.retrieval.protocol import Corpus, Passage

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


_WORD = re.compile(r"\w+")
_LONGEST = 40  # letters of an id before the hash
_DIGITS = 8  # of the hash, in hex


def pooled(pages: Iterable[Page]) -> list[Passage]:
    """The different passages, in the order in which they come."""
    found: dict[tuple[str, str], Passage] = {}
    for page in pages:
        # A page without letters is told from others by its marks.
        key = (letters(page.title), letters(page.text)) if letters(page.whole) else page[:2]
        if key not in found:
            found[key] = Passage(_name(page), page.text, page.title)
    return [*found.values()]


def _name(page: Page) -> str:
    words = "-".join(_WORD.findall((page.title or page.text).casefold()))
    digest = hashlib.blake2b(f"{page.title}\0{page.text}".encode(), digest_size=_DIGITS // 2)
    return f"{words[:_LONGEST].rstrip('-')}-{digest.hexdigest()}".lstrip("-")

"""English words that say how others belong together, and the words of a text without them.

The list is short and its own: BM25's lists come with the package bm25s, which scripted questions
and queries should not need, and Lucene's 33 words lack those that questions begin with.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+(?:['’-]\w+)*")

_WORDS = (
    # Articles and the like; pronouns; question words.
    "a an the this that these those all each every some any many much such "
    "i me my we us our you your he him his she her it its they them their one "
    "what when where which who whom whose why how "
    # Prepositions and conjunctions.
    "about after as at before by for from in into near of off on onto out over through to towards "
    "under until up with and but if or nor so than then because while "
    # Auxiliary verbs, and adverbs that tell nothing.
    "am are be been being is was were do does did has have had can could may might must shall "
    "should will would no not now just also too very there here"
)
FUNCTION_WORDS = frozenset(_WORDS.split())


def words_of(text: str) -> list[str]:
    """The words of a text in their order, without the marks around them."""
    return _WORD.findall(text)


def content_words(text: str) -> list[str]:
    """The words of a text in their order that are no function words, in whatever case."""
    return [word for word in words_of(text) if word.lower() not in FUNCTION_WORDS]

"""Sentences of corpora, and what is left of them when words are dropped at random.

A language model that knows nothing learns from such pairs to copy words, and to leave some out.
Reinforcement learning can then choose which. It needs no invented world, only texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from qrag_jax.data.scripted import Draw

STREAM = 15  # of `Draw`, for the words that are dropped; lower ones draw questions and styles
_END = re.compile(r"[.!?]['\")\]]*$")
# Before the full stop of these, and of single letters, a sentence goes on.
_SHORT = ("al", "approx", "cf", "dr", "e.g", "eq", "etc", "fig", "figs", "i.e", "mr", "mrs", "vs")


def sentences_of(
    texts: Iterable[str], most_words: int, least_words: int, together: int = 1
) -> Iterator[str]:
    """Yields the sentences of the texts that have a number of words within limits, in their order.

    White space separates tokens. A sentence ends with a token at whose end is a full stop, question
    mark or exclamation mark, perhaps before quotes or brackets, or with its text. A token that is a
    single letter or one of a few short forms (`Fig.`, `e.g.`) before the full stop ends none.
    The tokens of a sentence are joined by single blanks.

    Args:
        most_words, least_words: limits of the words of a sentence; tokens without a letter or digit
            do not count. `least_words` is 1 at least.
        together: so many neighbours of one text are one sentence here; those left at its end none.
    """
    for text in texts:
        split = iter(_split(text))
        # One iterator taken several times gives its neighbours.
        for neighbours in zip(*[split] * together, strict=False):
            tokens = [token for each in neighbours for token in each]
            if least_words <= sum(map(_is_word, tokens)) <= most_words:
                yield " ".join(tokens)


def frequent_words(texts: Iterable[str], share: float) -> frozenset[str]:
    """The words, in small letters, that more than this share of the texts have."""
    counts, number = Counter[str](), 0
    for text in texts:
        counts.update({word.lower() for word in words_of(text)})
        number += 1
    return frozenset(word for word, count in counts.items() if count > share * number)


def is_among(token: str, words: frozenset[str]) -> bool:
    """Whether a token has words, and all of them are among these, which are in small letters."""
    own = words_of(token)
    return bool(own) and all(word.lower() in words for word in own)


def _always(token: str) -> bool:
    return True


def dropped(sentence: str, draw: Draw, share: float, may: Callable[[str], bool] = _always) -> str:
    """The sentence without some of its tokens; the others keep their order.

    Args:
        draw: as many of its numbers are used as there are tokens, and one more if no word is left.
        share: the probability with which each token is dropped. If no word would be left, one of
            them, drawn uniformly, is all that is left.
    """
    tokens = sentence.split()
    words = [token for token in tokens if _is_word(token)]
    kept = [token for token in tokens if not (draw.chance(share) and may(token))]
    return " ".join(kept) if any(map(_is_word, kept)) else draw.choice(words)


def _is_word(token: str) -> bool:
    return bool(words_of(token))


def _split(text: str) -> Iterator[list[str]]:
    tokens: list[str] = []
    for token in text.split():
        tokens.append(token)
        if _ends(token):
            yield tokens
            tokens = []
    if tokens:
        yield tokens


def _ends(token: str) -> bool:
    if not _END.search(token):
        return False
    before = token.lstrip("'\"([").rstrip("'\")]").removesuffix(".").lower()
    return before not in _SHORT and not (len(before) == 1 and before.isalpha())


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

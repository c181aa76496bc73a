"""Sentences of corpora, and what is left of them when words are dropped at random.

A language model learns from such pairs to copy words, and to leave some out (DeepRetrieval's
section `dropped`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from qrag_jax.data.sample import Draw
from qrag_jax.errors import InputError

if TYPE_CHECKING:
    from qrag_jax.systems.deepretrieval_config import DroppedConfig

STREAM = 15  # of `Draw`, for the words that are dropped; lower ones draw questions and styles
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_END = re.compile(r"[.!?]['\")\]]*$")
# Before the full stop of these, and of single letters, a sentence goes on.
_SHORT = ("al", "approx", "cf", "dr", "e.g", "eq", "etc", "fig", "figs", "i.e", "mr", "mrs", "vs")
_FUNCTION_WORDS = (
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
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


def corpus_sentences(
    config: DroppedConfig, corpora: Iterable[Iterable[str]]
) -> tuple[list[str], frozenset[str]]:
    """The different sentences of corpora to demonstrate with, and the corpora's frequent words."""
    sentences: dict[str, None] = {}
    limits, every = (config.most_words, config.least_words), list[str]()
    for texts in corpora:
        known = [*texts]
        every += known
        for together in range(1, config.together + 1):
            sentences |= dict.fromkeys(sentences_of(known, *limits, together))
    if not sentences:
        raise InputError(
            f"no corpus has a sentence of {config.least_words} to {config.most_words} words, of "
            "which demonstrations would be; change config.dropped.least_words and most_words."
        )
    return [*sentences], frequent_words(every, config.frequent_from)


def draw_dropped(
    config: DroppedConfig, seed: int, index: int, sentence: str, frequent: frozenset[str]
) -> str:
    """Demonstration `index`, from 0: the sentence without words of one kind."""
    draw = Draw(seed, STREAM, index)
    kind = draw.choice(config.kinds) if len(config.kinds) > 1 else config.kinds[0]
    is_frequent = partial(is_among, words=frequent)
    if kind == "frequent":
        return dropped(sentence, draw, config.frequent_share, is_frequent)
    if kind == "rare":
        return dropped(sentence, draw, config.rare_share, lambda token: not is_frequent(token))
    return dropped(sentence, draw, config.share)


def sentences_of(
    texts: Iterable[str], most_words: int, least_words: int, together: int = 1
) -> Iterator[str]:
    """Yields the sentences of the texts that have a number of words within limits, in their order.

    White space separates tokens, which single blanks join again. A sentence ends with its text or
    with a token at whose end is a full stop, question mark or exclamation mark, perhaps before
    quotes or brackets. Single letters and a few short forms (`Fig.`, `e.g.`) end none.

    Tokens without a letter or digit are no words; `least_words` is 1 at least. `together`: so many
    neighbours of one text are one sentence here; those left at its end none.
    """
    for text in texts:
        split = iter(_split(text))
        # One iterator taken several times gives its neighbours.
        for neighbours in zip(*[split] * together, strict=False):
            tokens = [token for each in neighbours for token in each]
            if least_words <= sum(map(bool, map(words_of, tokens))) <= most_words:
                yield " ".join(tokens)


def _split(text: str) -> Iterator[list[str]]:
    tokens: list[str] = []
    for token in text.split():
        tokens.append(token)
        before = token.lstrip("'\"([").rstrip("'\")]").removesuffix(".").lower()
        goes_on = before in _SHORT or (len(before) == 1 and before.isalpha())
        if _END.search(token) and not goes_on:
            yield tokens
            tokens = []
    if tokens:
        yield tokens


def frequent_words(texts: Iterable[str], share: float) -> frozenset[str]:
    """The words, in small letters, that more than this share of the texts have."""
    every = [{word.lower() for word in words_of(text)} for text in texts]
    counts = Counter(word for words in every for word in words)
    return frozenset(word for word, count in counts.items() if count > share * len(every))


def is_among(token: str, words: frozenset[str]) -> bool:
    """Whether a token has words, and all of them are among these, which are in small letters."""
    return bool(words_of(token)) and {word.lower() for word in words_of(token)} <= words


def dropped(
    sentence: str, draw: Draw, share: float, may: Callable[[str], bool] = lambda token: True
) -> str:
    """The sentence without some of its tokens; the others keep their order.

    Each is dropped with probability `share`; if no word would be left, one of them, drawn
    uniformly, is. As many numbers are drawn as there are tokens, and then one more.
    """
    tokens = sentence.split()
    kept = [token for token in tokens if not (draw.chance(share) and may(token))]
    if any(map(words_of, kept)):
        return " ".join(kept)
    return draw.choice([token for token in tokens if words_of(token)])


def words_of(text: str) -> list[str]:
    """The words of a text in their order, without the marks around them."""
    return _WORD.findall(text)


def content_words(text: str) -> list[str]:
    """The words of a text in their order that are no function words, in whatever case."""
    return [word for word in words_of(text) if word.lower() not in FUNCTION_WORDS]

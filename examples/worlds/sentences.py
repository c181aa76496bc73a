"""Sentences of corpora, and what is left of them when words are dropped at random.

A language model learns from such pairs to copy words, and to leave some out (DeepRetrieval's
section `dropped`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from qrag_jax.data.sample import Draw
from qrag_jax.errors import InputError

if TYPE_CHECKING:
    from qrag_jax.systems.deepretrieval.config import DroppedConfig

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
    """The different sentences of corpora to demonstrate with, and the corpora's frequent words.

    White space separates tokens, which single blanks join again; tokens without a letter or digit
    are no words. Up to `config.together` neighbours of one text are one sentence here. Frequent
    words, in small letters, are in more than a share `config.frequent_from` of the texts.
    """
    sentences: dict[str, None] = {}
    counts: Counter[str] = Counter()
    least, most = config.least_words, config.most_words
    texts = 0
    for corpus in map(list, corpora):
        for together in range(1, config.together + 1):
            for text in corpus:
                # One iterator taken several times gives its neighbours.
                for neighbours in zip(*[_split(text)] * together, strict=False):
                    tokens = [token for sentence in neighbours for token in sentence]
                    if least <= sum(map(bool, map(words_of, tokens))) <= most:
                        sentences[" ".join(tokens)] = None
        counts.update(word for text in corpus for word in {w.lower() for w in words_of(text)})
        texts += len(corpus)
    if not sentences:
        raise InputError(
            f"no corpus has a sentence of {least} to {most} words, of which demonstrations would "
            "be; change config.dropped.least_words and most_words."
        )
    enough = config.frequent_from * texts
    return [*sentences], frozenset(word for word, count in counts.items() if count > enough)


def draw_dropped(
    config: DroppedConfig, seed: int, index: int, sentence: str, frequent: frozenset[str]
) -> str:
    """Demonstration `index`, from 0: the sentence without words of one kind.

    A token of that kind is dropped with a probability; if no word would be left, one, drawn
    uniformly, is. As many numbers are drawn as there are tokens, and then one more.
    """
    draw = Draw(seed, STREAM, index)
    kind = draw.choice(config.kinds) if len(config.kinds) > 1 else config.kinds[0]
    share = {"frequent": config.frequent_share, "rare": config.rare_share}.get(kind, config.share)

    def of_kind(token: str) -> bool:
        words = {word.lower() for word in words_of(token)}
        return kind == "any" or (bool(words) and words <= frequent) == (kind == "frequent")

    tokens = sentence.split()
    kept = [token for token in tokens if not (draw.chance(share) and of_kind(token))]
    if any(map(words_of, kept)):
        return " ".join(kept)
    return draw.choice([token for token in tokens if words_of(token)])


def _split(text: str) -> Iterator[list[str]]:
    """The tokens of each sentence.

    A sentence ends with its text or with a token at whose end is a full stop, question mark or
    exclamation mark, perhaps before quotes or brackets. Single letters and a few short forms
    (`Fig.`, `e.g.`) end none.
    """
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


def words_of(text: str) -> list[str]:
    """The words of a text in their order, without the marks around them."""
    return _WORD.findall(text)


def content_words(text: str) -> list[str]:
    """The words of a text in their order that are no function words, in whatever case."""
    return [word for word in words_of(text) if word.lower() not in FUNCTION_WORDS]

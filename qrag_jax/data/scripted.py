"""What scripts know and are made of, which quick trainings imitate before they learn by themselves.

- Random draws, and questions of which a script knows all. They are of an invented world, which is
  no part of the package: `examples/worlds`.
- Sentences of corpora, and what is left of them when words are dropped at random. A language model
  learns from such pairs to copy words, and to leave some out.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple, TypeVar

import numpy as np

from qrag_jax.data.queries import Query
from qrag_jax.data.sample import Passage, Sample, Split
from qrag_jax.runtime import own_code

BLOCK = 25  # talkative questions whose clauses are about persons in one another's passages
T = TypeVar("T")


class Draw:
    """Random draws that are the same on every machine.

    Philox fixes its raw 64-bit output; what `numpy.random.Generator` makes of it may change between
    numpy releases.
    """

    def __init__(self, seed: int, stream: int, index: int) -> None:
        key = np.array([seed, stream], dtype=np.uint64)
        counter = np.array([0, 0, 0, index], dtype=np.uint64)
        self._source = np.random.Philox(key=key, counter=counter)
        self._raw: list[int] = []

    def below(self, n: int) -> int:
        """An integer in [0, n); n must be far below 2^64 to make the bias negligible."""
        if not self._raw:  # 256 at a time, used from the last to the first
            self._raw = self._source.random_raw(256).tolist()
        return (self._raw.pop() * n) >> 64

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.below(1 << 53) < p * (1 << 53)

    def choice(self, items: Sequence[T]) -> T:
        """One of the items, uniformly."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a uniformly random order (Fisher-Yates)."""
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out


class BridgePassage(NamedTuple):
    """One passage of a question."""

    id: str  # its number in the question, from "0"
    title: str
    text: str  # its sentences; the first one begins with the name
    is_supporting: bool  # whether the question needs it
    said: tuple[str, str]  # for each hop's relation, the object that it gives; "" if none
    names: tuple[str, ...]  # all names in the passage without articles; the first is its title


@dataclasses.dataclass(frozen=True, slots=True)
class BridgeQuestion:
    """A question whose first passage names the bridge, and whose second passage has the answer.

    Attributes:
        entity, bridge: names of the two entities, the titles of the two supporting passages.
        relations: for each hop, the words by which the question asks for it, in their order and
            without function words, such as "company employs".
    """

    id: str
    question: str
    entity: str
    bridge: str
    relations: tuple[str, str]
    answer: str  # a name or a number in the second supporting passage
    passages: tuple[BridgePassage, ...]  # in shuffled order
    chain: tuple[int, int]  # places of the two supporting ones, in the order of the hops

    @property
    def supporting(self) -> tuple[BridgePassage, BridgePassage]:
        """The two passages that the question needs, in the order of the hops."""
        first, second = self.chain
        return self.passages[first], self.passages[second]

    @property
    def sample(self) -> Sample:
        """The question as the data sets have it; a chunk is a title, a blank and the text."""
        titles = tuple(passage.title for passage in self.passages)
        chunks = tuple(f"{passage.title} {passage.text}" for passage in self.passages)
        support = tuple(sorted(self.chain))
        return Sample(self.id, self.question, chunks, support, (self.answer,), "bridge", titles)

    @property
    def query(self) -> Sample:
        """The question as query writers have it; its gold pages are in the order of the hops."""
        return dataclasses.replace(self.sample, support=self.chain, source="")


class Clause(NamedTuple):
    """What a talkative question says about somebody else."""

    text: str
    name: str  # of the person, as it stands in the sentence: the whole name or the first word of it
    words: str  # what the text says of the person, without function words
    title: str  # of the passage about the person, which is another question's; the whole name


@dataclasses.dataclass(frozen=True, slots=True)
class TalkativeQuestion:
    """A question among clauses about others, whose gold passage has its answer."""

    id: str
    question: str
    entity: str  # name of the entity that it asks about, the title of the gold passage
    relation: str  # the words by which it asks, without function words, such as "company owns"
    answer: str  # a name or a number in the gold passage
    clauses: tuple[Clause, ...]  # in the order in which they stand, before or after what is asked
    passages: tuple[BridgePassage, ...]
    gold: int  # position in `passages` of the one passage that is relevant

    @property
    def documents(self) -> tuple[Passage, ...]:
        """The passages as a corpus has them; their names are unique over splits and seeds."""
        return tuple(Passage(f"{self.id}/{p.id}", p.text, p.title, {}) for p in self.passages)

    @property
    def judged(self) -> Query:
        """The question as a query; its one relevant document is among `documents`."""
        name = self.documents[self.gold].name
        return Query(self.id, self.question, ((name, 1),), (self.answer,))


@functools.cache
def world(file: str = "scripts.py") -> ModuleType:
    """The code of an invented world."""
    # Never one of the working folder: nobody named it.
    path = own_code.own_folder(own_code.EXAMPLES) / "worlds" / file
    return own_code.run_file(str(path), "the file of an invented world")


def bridge_questions(seed: int, split: Split, numbers: Iterable[int]) -> list[BridgeQuestion]:
    """The questions of these numbers, from 0; each depends on seed, split and number only."""
    return [world().bridge_question(seed, split, number) for number in numbers]


def talkative_questions(
    seed: int, split: Split, numbers: Iterable[int], clauses: int = 2
) -> list[TalkativeQuestion]:
    """As `bridge_questions`, with so many clauses about somebody else."""
    return [world().talkative_question(seed, split, number, clauses) for number in numbers]


def renaming(draw: Draw) -> Callable[[str], str]:
    """Gives the world's names in a text other spellings, the same in each text of one renaming."""
    return world().renaming(draw)


# ---------------------------------------------------------------- sentences and words

STREAM = 15  # of `Draw`, for the words that are dropped; lower ones draw questions and styles
_END = re.compile(r"[.!?]['\")\]]*$")
# Before the full stop of these, and of single letters, a sentence goes on.
_SHORT = ("al", "approx", "cf", "dr", "e.g", "eq", "etc", "fig", "figs", "i.e", "mr", "mrs", "vs")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
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


def words_of(text: str) -> list[str]:
    """The words of a text in their order, without the marks around them."""
    return _WORD.findall(text)


def content_words(text: str) -> list[str]:
    """The words of a text in their order that are no function words, in whatever case."""
    return [word for word in words_of(text) if word.lower() not in FUNCTION_WORDS]


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

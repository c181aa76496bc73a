"""Questions of which a script knows all, and the random draws that scripts are made of.

The quick trainings imitate scripts before they learn by themselves. Their questions are of an
invented world, which is no part of the package: `examples/worlds`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
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

    The definition of Philox fixes its raw 64-bit output. What `numpy.random.Generator` makes of
    this output may change between numpy releases. So this class makes the few draws itself.
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
    """One passage of a question.

    Attributes:
        said: for each hop's relation, the object that the passage gives; "" if it gives none.
    """

    id: str  # its number in the question, from "0"
    title: str
    text: str  # its sentences; the first one begins with the name
    is_supporting: bool  # whether the question needs it
    said: tuple[str, str]
    names: tuple[str, ...]  # all names in the passage without articles; the first is its title


@dataclasses.dataclass(frozen=True, slots=True)
class BridgeQuestion:
    """A question whose first passage names the bridge, and whose second passage has the answer.

    Attributes:
        entity, bridge: names of the two entities, the titles of the two supporting passages.
        relations: for each hop, the words by which the question asks for it, in their order and
            without function words, such as "company employs".
        chain: positions in `passages` of the two supporting ones, in the order of the hops.
    """

    id: str
    question: str
    entity: str
    bridge: str
    relations: tuple[str, str]
    answer: str  # a name or a number in the second supporting passage
    passages: tuple[BridgePassage, ...]  # in shuffled order
    chain: tuple[int, int]

    @property
    def supporting(self) -> tuple[BridgePassage, BridgePassage]:
        """The two passages that the question needs, in the order of the hops."""
        first, second = self.chain
        return self.passages[first], self.passages[second]

    @property
    def sample(self) -> Sample:
        """The question as the data sets have it; a chunk is a title, a blank and the text."""
        return Sample(
            id=self.id,
            question=self.question,
            chunks=tuple(f"{passage.title} {passage.text}" for passage in self.passages),
            support=tuple(sorted(self.chain)),
            answers=(self.answer,),
            source="bridge",
            titles=tuple(passage.title for passage in self.passages),
        )

    @property
    def query(self) -> Sample:
        """The question as query writers have it; its gold pages are in the order of the hops."""
        return dataclasses.replace(self.sample, support=self.chain, source="")


class Clause(NamedTuple):
    """What a talkative question says about somebody else."""

    text: str
    name: str  # of the person, as it stands in the sentence: the whole name or the first word of it
    words: str  # what is told of the person, without function words
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
        return tuple(
            Passage(f"{self.id}/{each.id}", each.text, each.title, {}) for each in self.passages
        )

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

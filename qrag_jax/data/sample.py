"""A question with what its data say of it: passages, gold, answers, and how to take it apart."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from qrag_jax.runtime import own_code
from qrag_jax.runtime.retriever_config import passage_text

T = TypeVar("T")
Split = Literal["train", "dev"]
SPLITS: tuple[Split, ...] = ("train", "dev")
OF_VALUES = frozenset({"niah"})  # sources whose answers are values that are all asked for
HELD_OUT_SHARE = 0.1
_SLOT = re.compile(r"#([1-9][0-9]?)(?![0-9])")


class Passage(NamedTuple):
    """A passage of a corpus or of a question; of a gold page, perhaps the title alone is known."""

    name: str = ""  # the id in the corpus's file; "" of a question's own
    text: str = ""  # what follows the title; "" if it is unknown
    title: str = ""  # "" if it has none
    metadata: Mapping[str, Any] = {}  # further fields, as JSON has them

    def __hash__(self) -> int:
        return hash(self[:3])  # a mapping has no hash

    @property
    def whole(self) -> str:
        """Title and text, as words are searched; see `passage_text`."""
        return passage_text(self.title, self.text)


class BadRecord(ValueError):
    """A record that cannot become a `Sample`; its message is a short reason and serves as a key."""


@dataclasses.dataclass(frozen=True, slots=True)
class SubQuestion:
    text: str  # the question; `#1` stands for the answer of the first hop
    answers: tuple[str, ...]  # the answer and its other forms, one at least

    @property
    def needs(self) -> tuple[int, ...]:
        """Positions of the earlier hops whose answers the question needs, sorted."""
        return tuple(sorted({int(number) - 1 for number in _SLOT.findall(self.text)}))

    def filled(self, answers: Sequence[str]) -> str:
        """The question with the answers of the earlier hops, `[hop]`, in their slots."""
        return _SLOT.sub(lambda slot: answers[int(slot[1]) - 1], self.text)


def letters(text: str) -> str:
    """The letters and digits of a text, in whatever case."""
    return "".join(filter(str.isalnum, text.casefold()))


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A question, or a query to search by or to rewrite, with what is known of it."""

    id: str  # unique within its source or collection; written to logs; "": a query has none
    question: str
    chunks: tuple[str, ...] = ()  # its own passages; () if a corpus has to be searched for them
    # Places of the supporting facts, distinct, in the data's order; () without chunks, or in data
    # of one's own, which then have answers
    support: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()  # the answer followed by its aliases, or see `needs_all`
    source: str = ""  # name of the source the sample came from, e.g. "hotpotqa"
    titles: tuple[str, ...] = ()  # with which each chunk begins, "" for one without; () if unknown
    pages: tuple[Passage, ...] = ()  # gold pages of a question without chunks
    # Sub-questions in the order in which they can be asked; () if none is known, or nobody asked
    # for them. In a chain, the answer of the last one is one of `answers`; in a comparison, the
    # answers of all decide which it is.
    hops: tuple[SubQuestion, ...] = ()
    # (id, relevance of 1 or more) of each relevant document of a query; () where nothing is judged
    grades: tuple[tuple[str, int], ...] = ()
    collection: str = ""  # that a query searches; "" if the data name none
    until: str = ""  # only documents up to this day may be found, as YYYY-MM-DD; "": all may
    fault: str = dataclasses.field(default="", compare=False)  # a harmless one of its record

    @property
    def needs_all(self) -> bool:
        """Whether `answers` are values that are all asked for, and not forms of one answer."""
        return self.source in OF_VALUES

    @property
    def relevant(self) -> frozenset[str]:
        """Names of the documents that `grades` has."""
        return frozenset(name for name, _ in self.grades)

    def passage(self, place: int) -> Passage:
        """A chunk as its title and what follows it."""
        title, chunk = self.titles[place] if self.titles else "", self.chunks[place]
        text = chunk.removeprefix(title).removeprefix(".").lstrip() if title else chunk
        return Passage("", text, title)

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The question's own passages, which may be pooled with those of others."""
        return tuple(map(self.passage, range(len(self.chunks))))

    @property
    def gold(self) -> tuple[Passage, ...]:
        """The pages to be found, in the data's order."""
        return self.pages or tuple(map(self.passage, self.support))


def taken_apart(sample: Sample, hops: tuple[SubQuestion, ...]) -> Sample:
    """The sample with these sub-questions, which must be such that they can be asked in order."""
    if not hops:
        raise BadRecord("no decomposition")
    if not sample.answers:
        raise BadRecord("no answer")
    if not all(hop.text.strip() for hop in hops):
        raise BadRecord("empty sub-question")
    if not all(hop.answers and all(map(letters, hop.answers)) for hop in hops):
        raise BadRecord("sub-answer without a word")
    if any(needed >= place for place, hop in enumerate(hops) for needed in hop.needs):
        raise BadRecord("sub-question needs a later answer")
    return dataclasses.replace(sample, hops=hops)


def placed(facts: Iterable[T], places: Iterable[int], between: Iterable[T]) -> list[T]:
    """The chunks of a document with its facts at these places, and the others between."""
    chunks = list(between)
    for place, fact in sorted(zip(places, facts, strict=True), key=itemgetter(0)):
        chunks.insert(place, fact)
    return chunks


def is_held_out(sample_id: str) -> bool:
    """Whether a question is one to score by, of data without a part for it; its id decides."""
    digest = hashlib.sha256(sample_id.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def fingerprint(samples: Sequence[Sample]) -> str:
    """A digest of the samples' texts, facts, answers and sources."""
    digest = hashlib.sha256()
    for s in samples:
        fields = (s.id, s.question, s.chunks, s.support, s.answers, s.source)
        digest.update(json.dumps(fields).encode())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- samples made at each access


class LazySamples(Sequence[Sample]):
    """A sequence whose item i is `make(i)`, never kept: long documents need no memory.

    `content` is a digest of the texts that samples are made of; "" if it is not known.
    """

    def __init__(
        self, count: int | range, make: Callable[[int], Sample], content: str = ""
    ) -> None:
        self._indices = count if isinstance(count, range) else range(count)
        self._make, self.content = make, content

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazySamples(self._indices[index], self._make, self.content)
        return self._make(self._indices[index])

    def drawn(self, index: int, epoch: int) -> Sample:
        """The sample in this epoch: the same in all, unless a subclass redraws it."""
        return self[index]


class _Joined(LazySamples):
    def __init__(self, parts: Sequence[Sequence[Sample]]) -> None:
        self._places = [(part, index) for part in parts for index in range(len(part))]
        super().__init__(len(self._places), lambda index: self.drawn(index, 0))

    def drawn(self, index: int, epoch: int) -> Sample:
        return drawn(*self._places[index], epoch)


def drawn(samples: Sequence[Sample], index: int, epoch: int) -> Sample:
    """The sample as it is in this epoch of its source."""
    return samples.drawn(index, epoch) if isinstance(samples, LazySamples) else samples[index]


def joined(parts: Sequence[Sequence[Sample]]) -> Sequence[Sample]:
    """The samples of all parts, one after the other; lazy if one of the parts is."""
    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, LazySamples) for part in parts):
        return [sample for part in parts for sample in part]
    return _Joined(parts)


# ---------------------------------------------------------------- invented worlds
# What the scripts in `examples/worlds` share with the package.

BLOCK = 25  # talkative questions whose clauses are about persons in one another's passages


@functools.cache
def world(file: str = "scripts.py") -> ModuleType:
    """The code of an invented world: its questions, or what is in another of its files."""
    # Never one of the working folder: nobody named it.
    path = own_code.own_folder(own_code.EXAMPLES) / "worlds" / file
    return own_code.run_file(str(path), "the file of an invented world")


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
        return self.below(1 << 53) < p * (1 << 53)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a uniformly random order (Fisher-Yates)."""
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out

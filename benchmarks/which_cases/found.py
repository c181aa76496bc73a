"""What a row of the suite which has read for each question, and what that cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

COUNTS = (2, 4, 6, 10)  # passages at which a list is cut
MOST = COUNTS[-1]
READ = 4  # passages of the figures that are compared, and that a reader answers by
_FUSION = 60.0  # as `qrag_jax.retrieval.hybrid` has it


@dataclasses.dataclass(frozen=True)
class Asking:
    """The cost of asking, means over the questions. None: not known.

    Attributes:
        milliseconds: of all questions, asked as the row's own command or search asks them (side by
            side), over their number; starting and compiling are not in it.
        encoder_tokens: tokens that an encoder reads for a question.
        read_tokens, written_tokens: of a language model.
        searches: of the corpus.
    """

    milliseconds: float | None = None
    encoder_tokens: float = 0.0
    read_tokens: float = 0.0
    written_tokens: float = 0.0
    searches: float = 1.0


class Course(NamedTuple):
    """How a training went on.

    measure: the score that chooses its best checkpoint, on the questions for choices.
    points: processor minutes and score, oldest first.
    """

    measure: str
    points: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Training:
    """The cost of training. None: not counted.

    Attributes:
        cpu_minutes: processor time of all its processes, of all their threads.
        minutes: by the clock.
        tokens: that are learned from: of a language model those that it sampled or imitated, of an
            encoder all that it reads.
        searches: of the corpus.
        untold: starts that were killed and whose minutes are not in these.
        course: how it went on; None: it was never scored on the way.
    """

    cpu_minutes: float = 0.0
    minutes: float = 0.0
    tokens: float | None = None
    searches: float | None = None
    untold: int = 0
    course: Course | None = None

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Training:
        """The inverse of `dataclasses.asdict`, by way of a file."""
        course = kept["course"]
        if course is not None:
            measure, points = course
            course = Course(measure, tuple((when, score) for when, score in points))
        return cls(**{**kept, "course": course})


@dataclasses.dataclass(frozen=True)
class Found:
    """One ordered list of passages for each question, as they were read.

    Attributes:
        lists: question id → names of passages, in the order in which they are read, each once, at
            most `MOST`. Questions that were not asked are not there.
        asking: its cost.
        index_bytes: of the files of the index that is searched, without the texts.
        note: what a reader of the figures must know; "" if nothing.
    """

    lists: Mapping[str, tuple[str, ...]]
    asking: Asking
    index_bytes: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Found:
        """The inverse of `to_json`."""
        lists = {question: tuple(names) for question, names in kept["lists"].items()}
        return cls(lists, Asking(**kept["asking"]), kept["index_bytes"], kept["note"])


def read_list(names: Iterable[str]) -> tuple[str, ...]:
    """The passages in their order, each where it comes first, at most `MOST`."""
    return tuple(dict.fromkeys(names))[:MOST]


def by_turns(searches: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """What several searches found: the best of each one, then the second ones; see `read_list`.

    So a list that is cut early has something of every search, by the same rule for all rows.
    """
    turns = itertools.zip_longest(*searches)
    return read_list(name for turn in turns for name in turn if name is not None)


def fused(searches: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """What several searches found, by the sums of 1 / (60 + rank), as the engine `hybrid` does.

    Reciprocal rank fusion (Cormack et al., 2009). See `read_list`.
    """
    sums: dict[str, float] = {}
    for names in searches:
        for rank, name in enumerate(names, 1):
            sums[name] = sums.get(name, 0.0) + 1 / (_FUSION + rank)
    return read_list(sorted(sums, key=lambda name: -sums[name]))

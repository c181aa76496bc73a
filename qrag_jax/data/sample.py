"""A training or evaluation question with its chunks, before it becomes tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

from qrag_jax.runtime.retriever_config import passage_text

Split = Literal["train", "dev"]
SPLITS: tuple[Split, ...] = ("train", "dev")


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One multi-hop question with the chunks that may contain its answer.

    Attributes:
        id: unique within its source; written to retrieval logs.
        question: the question's text.
        chunks: the candidate passages in document order.
        support: indices into `chunks` of the supporting facts, distinct, in the data's order. It is
            empty only in data of one's own (source "own") that do not know them; then there are
            answers.
        answers: the answer followed by its aliases, or see `needs_all`; may be empty.
        source: name of the source the sample came from, e.g. "hotpotqa".
    """

    id: str
    question: str
    chunks: tuple[str, ...]
    support: tuple[int, ...]
    answers: tuple[str, ...]
    source: str

    @property
    def needs_all(self) -> bool:
        """Whether `answers` are values that are all asked for, and not forms of one answer."""
        return self.source in OF_VALUES


OF_VALUES = frozenset({"niah"})  # sources


class BadRecord(ValueError):
    """A record that cannot become a `Sample`; its message is a short reason and serves as a key."""


HELD_OUT_SHARE = 0.1


def is_held_out(sample_id: str) -> bool:
    """Whether a question is one to score by, of data without a part for it; its id decides."""
    digest = hashlib.sha256(sample_id.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def fingerprint(samples: Sequence[Sample]) -> str:
    """A digest of all fields of the samples."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(dataclasses.astuple(sample)).encode())
    return digest.hexdigest()[:16]


class Page(NamedTuple):
    """A passage of a question, or a gold page of which less is known.

    Attributes:
        title: "" if it has none.
        text: what follows the title; "" if it is unknown.
        id: in the corpus that comes with the data; "" if none does.
    """

    title: str
    text: str = ""
    id: str = ""

    @property
    def whole(self) -> str:
        """Title and text, as corpora are searched."""
        return passage_text(self.title, self.text)


@dataclasses.dataclass(frozen=True, slots=True)
class QueryQuestion:
    """One question.

    Attributes:
        id: unique within its data set.
        question: the question's text.
        answers: the answer followed by its aliases; may be empty.
        gold: the pages to be found, one at least.
        passages: the question's own, which may be pooled with those of others; () if it has none.
        source: see `Sample`; "" for what has none.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Page, ...]
    passages: tuple[Page, ...] = ()
    source: str = ""

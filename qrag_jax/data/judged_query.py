"""A query whose relevant documents are known by their ids in a corpus."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from qrag_jax.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class JudgedQuery:
    """One query.

    Attributes:
        id: unique within its data.
        text: what a user asks, and a language model rewrites.
        grades: (document's id, relevance) of the relevant documents, each once; relevance is 1 or
            more.
        answers: short answers of which a document may have one; () if none is known.
        until: only documents up to this day may be found, as YYYY-MM-DD; "": all may.
    """

    id: str
    text: str
    grades: tuple[tuple[str, int], ...]
    answers: tuple[str, ...] = ()
    until: str = ""


class InCorpus(NamedTuple):
    """What becomes of judged queries on a corpus.

    Attributes:
        queries: those of which the corpus has a relevant document, in their order. Their grades are
            as they were, so that a document that the corpus lacks counts as not found.
        dropped: ids of the others, which no search could solve.
        documents: how many different documents are relevant for the `queries`.
        lacking: how many of these the corpus lacks.
    """

    queries: list[JudgedQuery]
    dropped: tuple[str, ...]
    documents: int
    lacking: int

    @property
    def summary(self) -> str:
        """One line for the screen; "" if the corpus lacks nothing."""
        told = []
        if self.dropped:
            told.append(
                f"{len(self.dropped)} of {len(self.dropped) + len(self.queries)} queries left out, "
                f"of which the corpus has no relevant document; the first is {self.dropped[0]}"
            )
        if self.lacking:
            told.append(
                f"the corpus lacks {self.lacking} of the {self.documents} documents that are "
                "relevant for the queries that are kept"
            )
        return "; ".join(told)


class Origin(NamedTuple):
    """Where judged queries and their corpus are from, as sentences name it.

    Attributes:
        queries: the field of the queries, such as "config.queries.train".
        corpus: the documents, such as "the corpus of data/scifact".
        fix: what to do about a corpus that is not theirs, such as "give the corpus that they are
            about in config.search.index".
    """

    queries: str
    corpus: str
    fix: str


def check_in_corpus(
    queries: Sequence[JudgedQuery],
    known_ids: AbstractSet[str],
    origin: Origin,
    max_missing_share: float = 0.0,
) -> InCorpus:
    """Drops the queries of which the corpus has no relevant document, and refuses too many.

    Args:
        queries: see `JudgedQuery`.
        known_ids: ids of the corpus' documents; those of judged documents are enough.
        origin: of queries and corpus.
        max_missing_share: of the queries, those that may be dropped.
    """
    if not queries:
        raise InputError(f"{origin.queries} has no judged query; name data that have some.")
    kept: list[JudgedQuery] = []
    dropped: list[JudgedQuery] = []
    for each in queries:
        there = any(document in known_ids for document, _ in each.grades)
        (kept if there else dropped).append(each)
    if not kept or len(dropped) > max_missing_share * len(queries):
        first = dropped[0]
        raising = f", or raise config.search.max_missing_share, {max_missing_share}"
        raise InputError(
            f"{origin.queries}: {origin.corpus} has no relevant document of {len(dropped)} of "
            f"{len(queries)} queries (the first is {first.id!r}{_such_as(first)}), so these seem "
            f"to be judgements of another collection; {origin.fix}{raising if kept else ''}."
        )
    documents = {document for each in kept for document, _ in each.grades}
    lacking = sum(document not in known_ids for document in documents)
    return InCorpus(kept, tuple(each.id for each in dropped), len(documents), lacking)


def _such_as(query: JudgedQuery) -> str:
    return f", with document {query.grades[0][0]!r}" if query.grades else ""

"""What DeepRetrieval (arXiv 2503.00223) asks, and how an episode ends.

A model reads one query and writes another one for the same need. What the written query finds is
judged: by graded documents, or by the answers that stand in them.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping

from qrag_jax.environments.query_rewriting.output import REWRITTEN
from qrag_jax.environments.tools.episode import Closed, Document, ToolTask
from qrag_jax.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class RewriteTask(ToolTask):
    """A query to rewrite; `question` is the original one.

    `gold_ids` are the documents of `grades`, in their order. `documents` are empty, since all
    queries search a collection. `RewriteTask.judged` makes a task from judgements as files have
    them.

    Attributes:
        grades: (document id, relevance) pairs; each document once, each relevance at least 1.
        collection: name of the collection that is searched, where there are several.
        until: YYYY-MM-DD, the last day of publication that a search engine may find; "": any.
    """

    grades: tuple[tuple[str, int], ...] = ()
    collection: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        ToolTask.__post_init__(self)  # super() does not know a class with slots
        ids = tuple(document for document, _ in self.grades)
        if len(set(ids)) < len(ids):
            twice = next(each for each in ids if ids.count(each) > 1)
            raise InputError(
                f"the query {self.id!r} has two grades of the document {twice!r}; give it one."
            )
        for document, grade in self.grades:
            if grade < 1:
                raise InputError(
                    f"the query {self.id!r} grades the document {document!r} as {grade}; leave "
                    "out documents that are not relevant."
                )
        if self.gold_ids != ids:
            raise InputError(
                f"the query {self.id!r} has gold_ids other than the documents of its grades; give "
                "both the same."
            )
        if self.until and not _is_day(self.until):
            raise InputError(
                f"the query {self.id!r} has until {self.until!r}; write a day as YYYY-MM-DD."
            )

    @classmethod
    def judged(
        cls,
        id: str,
        question: str,
        judgements: Mapping[str, int],
        *,
        answers: tuple[str, ...] = (),
        collection: str = "",
        until: str = "",
    ) -> RewriteTask:
        """A task from judgements, of which only the relevant ones, 1 or more, count.

        Args:
            id: the query's own in its data set.
            question: the original query.
            judgements: document id → relevance.
            answers: for rewards by the answers in the documents found.
            collection, until: see the class.
        """
        grades = tuple((name, grade) for name, grade in judgements.items() if grade >= 1)
        return cls(
            id=id,
            question=question,
            answers=answers,
            gold_ids=tuple(name for name, _ in grades),
            grades=grades,
            collection=collection,
            until=until,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten(Closed):
    """How an episode ended; `answer` is the query, "" if there is none.

    Attributes:
        outcome: one of `output.OUTCOMES`.
        found: the documents that the query found, best first; () if it was not searched for.
    """

    outcome: str = REWRITTEN
    found: tuple[Document, ...] = ()


def _is_day(text: str) -> bool:
    try:
        # Dates without hyphens and those of weeks can be read, too, but are not written so.
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False

"""The state of a query writer (LeReT, arXiv 2410.23214): a question and the passages found so far.

At each hop the model writes one query. What it finds joins the pool, which only grows. A gold page
is known by a key: the id of its passage, or its title where a page may have several passages.
"""

from __future__ import annotations

import dataclasses
import html
import unicodedata
from collections.abc import Iterable, Sequence

from qrag_jax.environments.tools.episode import Closed, Document, ToolTask

BY_PASSAGE, BY_TITLE = KEYS = ("passage", "title")
BY_HOP, BY_SCORE = ORDERS = ("hop", "score")
# What a try came to. Only a query that was searched for, or a wish to stop, is scored.
SEARCHED, STOPPED, EMPTY, TOO_LONG = OUTCOMES = (
    "searched",
    "stopped",
    "no_query",  # an LLM call may fail as "empty" and "too_long"; these are no failures of a call
    "query_too_long",
)

Pool = tuple[Document, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class QueryState(ToolTask):
    """A question, and what the hops before this one have found.

    `gold_ids` are the passages of the gold pages; `documents` are empty, since all questions search
    one corpus.

    Attributes:
        pages: keys of the gold pages, each once.
        source: of the question; see `data.query_question`.
        hop: number of the next hop, from 1.
        pool: passages found so far.
        variant: number of the prompt that asks for the query; 0 is the bare one.
    """

    pages: tuple[str, ...] = ()
    source: str = ""
    hop: int = 1
    pool: Pool = ()
    variant: int = 0

    def asked_by(self, variant: int) -> QueryState:
        """The same state, asked by another prompt."""
        return dataclasses.replace(self, variant=variant)

    def after(self, pool: Pool) -> QueryState:
        """The state of the next hop."""
        return dataclasses.replace(self, hop=self.hop + 1, pool=pool, variant=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Searched(Closed):
    """How one try at a hop ended; `answer` is the query, "" if there is none.

    Attributes:
        outcome: one of `OUTCOMES`.
        found: the passages that the query found, best first.
    """

    outcome: str = SEARCHED
    found: tuple[Document, ...] = ()


def grown(pool: Sequence[Document], found: Iterable[Document], order: str) -> Pool:
    """The pool with what a hop has found; a passage that is there already stays in its place.

    Args:
        order: "hop": by hop, then by rank; "score": by raw score, as LeReT has it, and by hop and
            rank where scores are equal.
    """
    together: dict[str, Document] = {}
    for each in (*pool, *found):
        together.setdefault(each.id, each)
    every = [*together.values()]
    if order == BY_SCORE:
        every.sort(key=lambda each: -each.score)
    return tuple(every)


def key_of(document: Document, by: str) -> str:
    """The key of the page that a passage belongs to.

    Args:
        by: one of `KEYS`.
    """
    return document.id if by == BY_PASSAGE else normalised_title(document.title)


def normalised_title(title: str) -> str:
    """The title without case, accents, punctuation and double blanks, so that spellings agree.

    Entities such as &amp; are read. Signs stay, since C++ is not C. A title that is nothing but
    punctuation keeps it: "!!!" is not "?".
    """
    # Case last: compatibility forms such as the trade mark's sign are taken apart into capitals.
    plain = unicodedata.normalize("NFKD", html.unescape(title)).casefold()
    letters = [
        " " if unicodedata.category(each).startswith("P") or each == "`" else each
        for each in plain
        if not unicodedata.combining(each)
    ]
    return " ".join("".join(letters).split()) or " ".join(plain.split())

"""The log of a query rewriter: one JSON line for each query, what became of it, what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.metrics.row_log import RowLog


@dataclasses.dataclass(frozen=True)
class RewriteRow:
    """One query, written anew in one way.

    Attributes:
        id: unique within its collection.
        collection: "" where there is one without a name.
        original: the query that was given.
        query: what was searched for; "" if there is none.
        outcome: one of `query_rewriting.output.OUTCOMES`, or the cause of a failure; "" if no model
            wrote the query.
        text: what the model wrote.
        found: ids and scores of documents, best first; None: nothing was searched.
        sampled: tokens.
    """

    id: str
    collection: str
    original: str
    query: str
    outcome: str = ""
    text: str = ""
    found: tuple[tuple[str, float], ...] | None = ()
    sampled: int = 0

    @property
    def failed(self) -> bool:
        """Whether a call failed, so that nobody knows what the query would have found."""
        return self.outcome in INFRASTRUCTURE

    @property
    def ranking(self) -> tuple[str, ...]:
        """Ids of what was found, best first."""
        return tuple(name for name, _ in self.found or ())


LOG = RowLog(RewriteRow, "give --restart, or delete it")
write, append = LOG.write, LOG.append
read, read_parts = LOG.read, LOG.read_parts


def of_queries(rows: Sequence[RewriteRow], keys: Sequence[tuple[str, str]]) -> bool:
    """Whether the rows are of these (collection, id) pairs, in this order."""
    return [(row.collection, row.id) for row in rows] == [*keys]

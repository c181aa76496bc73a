"""A search service on the web, as what an agent's tools read: it gives ids and no texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from qrag_jax.environments.tools.episode import Document, Look, Open, ToolTask
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.pubmed import RemoteEngine, RemoteSearch, check_day


def no_limit(task: ToolTask) -> str:
    """No last day, for any question."""
    return ""


@dataclasses.dataclass(frozen=True)
class RemoteLibrary:
    """See `token_episodes.Library`. Documents have ids, and neither title, text nor score.

    Attributes:
        engine: the service.
        until: the last day that the date of a question's documents may be, as "YYYY-MM-DD"; "": no
            limit.
    """

    engine: RemoteEngine
    until: Callable[[ToolTask], str] = no_limit

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first; a search that failed is a `Failure`.

        Raises:
            InputError: fewer than 1 document is wanted, or `until` gives no date.
        """
        wanted = [RemoteSearch(step.query, step.most, self._until(task)) for task, step in asked]
        return [
            found if isinstance(found, Failure) else _documents(task, found)
            for (task, _), found in zip(asked, self.engine.search(wanted), strict=True)
        ]

    def open(self, task: ToolTask, step: Open) -> Failure:
        """A `Failure`: the service is asked for ids alone."""
        return Failure("request", f"{self.engine.title} is searched here, and gives no texts.", 0)

    def digest(self, task: ToolTask) -> str:
        """Names all that decides what a query of this question finds, and no key.

        Raises:
            InputError: `until` gives no date.
        """
        return f"{self.engine.digest} until={self._until(task) or 'open'}"

    def _until(self, task: ToolTask) -> str:
        day = self.until(task)
        check_day(day, f"the last day of the question {task.id!r}")
        return day


def _documents(task: ToolTask, ids: Sequence[str]) -> tuple[Document, ...]:
    gold = set(task.gold)
    return tuple(Document(each, "", "", each in gold) for each in ids)

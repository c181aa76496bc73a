"""Keeps what searches found, so that a query is searched for once, whoever asks again.

A result is kept by what was searched (the digest of the collection, or the service with its date
limit), by the query without needless blanks, and by how many documents were asked for. Failures are
not kept. Letters keep their case, which Boolean operators need.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from qrag_jax.environments.episode import Document, Look, Open, ToolTask
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line

_Key = tuple[str, str, int]
_Found = tuple[tuple[str, str, str, float], ...]  # id, title, text, score


class NamedLibrary(Protocol):
    """A `token_episodes.Library` that can tell what a task's queries search."""

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """See `token_episodes.Library`."""
        ...

    def open(self, task: ToolTask, step: Open) -> Document | Failure | None:
        """See `token_episodes.Library`."""
        ...

    def digest(self, task: ToolTask) -> str:
        """Names all that decides what a query of this task finds."""
        ...


class KeptResults:
    """See `token_episodes.Library`; the results used longest ago are dropped first.

    Args:
        library: what is searched.
        most: results that are kept.

    Attributes:
        library: what is searched.
        asked, searched: searches that were asked for, and those that the library did.
        failed: those of the latter that failed.
    """

    def __init__(self, library: NamedLibrary, most: int) -> None:
        self.asked = self.searched = self.failed = 0
        self.library, self._most = library, most
        self._kept: OrderedDict[_Key, _Found] = OrderedDict()
        self._lock = threading.Lock()

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first; equal ones are done once."""
        keys = [self._key(task, step) for task, step in asked]
        with self._lock:
            known = {key: self._kept[key] for key in keys if key in self._kept}
        new = {key: pair for key, pair in zip(keys, asked, strict=True) if key not in known}
        results = self.library.look([*new.values()]) if new else []
        failures: dict[_Key, Failure] = {}
        for key, result in zip(new, results, strict=True):
            if isinstance(result, Failure):
                failures[key] = result
            else:
                known[key] = tuple((d.id, d.title, d.text, d.score) for d in result)
        with self._lock:
            self.asked += len(asked)
            self.searched += len(new)
            self.failed += len(failures)
            for key in keys:
                if key in known:
                    self._kept[key] = known[key]
                    self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return [
            failures[key] if key in failures else _documents(task, known[key])
            for key, (task, _) in zip(keys, asked, strict=True)
        ]

    def open(self, task: ToolTask, step: Open) -> Document | Failure | None:
        """As the library has it."""
        return self.library.open(task, step)

    def _key(self, task: ToolTask, step: Look) -> _Key:
        return self.library.digest(task), one_line(step.query), step.most


def _documents(task: ToolTask, found: _Found) -> tuple[Document, ...]:
    """Whether a document is relevant is the task's matter, not the search's."""
    gold = set(task.gold)
    return tuple(Document(id, title, text, id in gold, score) for id, title, text, score in found)

"""Corpora that questions share, here or behind a service, as what an agent's tools read."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qrag_jax.environments.episode import Document, Look, Open, ToolTask
from qrag_jax.environments.tasks import document_text
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.judged_queries import names_of
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.retrieval.own_documents import DocumentSearch, OwnRetriever
from qrag_jax.retrieval.protocol import NONE, Passage
from qrag_jax.retrieval.pubmed import RemoteEngine, RemoteSearch


@dataclasses.dataclass(frozen=True)
class CorpusLibrary:
    """See `token_episodes.Library`. The ids of documents are the passages' names."""

    corpus: StoredCorpus  # the passages
    # their index; None: a search gives the question's gold passages, a bound from above
    searched: SingleStepSearch | None
    clean: bool = True  # whether quotes are made straight, as in a question's own documents

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first. Equal queries are searched once."""
        if self.searched is None:
            return [self.named(task, task.gold) for task, _ in asked]
        most: dict[str, int] = {}
        for _, step in asked:
            most[step.query] = max(most.get(step.query, 0), step.most)
        if not most:
            return []
        found = dict(zip(most, self.searched.search(list(most), max(most.values())), strict=True))
        return [
            tuple(
                self._document(task, Passage(hit.id, hit.text, hit.title), hit.score)
                for hit in found[step.query][: step.most]
            )
            for task, step in asked
        ]

    def open(self, task: ToolTask, step: Open) -> Document | None:
        return next(iter(self.named(task, (step.doc_id,))), None)

    def named(self, task: ToolTask, names: Sequence[str]) -> tuple[Document, ...]:
        """The passages of these names, in their order, without those that are not there."""
        numbers = self.corpus.numbers(names)
        passages = self.corpus.passages(numbers[numbers != NONE])
        return tuple(self._document(task, each) for each in passages)

    def _document(self, task: ToolTask, each: Passage, score: float = 0.0) -> Document:
        text = document_text(each.title, each.text, self.clean)
        return Document(each.name, each.title, text, each.name in task.gold, score)


def on_corpus(tasks: Iterable[ToolTask], corpus: StoredCorpus) -> list[ToolTask]:
    """The tasks without documents of their own: their gold documents are passages of the corpus.

    Passages are found by their text. A question of which the corpus lacks a gold document has no
    `gold_ids`, because no search could find all of them.
    """
    gold = [(task, [each.text for each in task.documents if each.is_supporting]) for task in tasks]
    names = names_of(corpus, (text for _, texts in gold for text in texts))

    def ids(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[text] for text in texts) if names.keys() >= set(texts) else ()

    return [dataclasses.replace(task, documents=(), gold_ids=ids(texts)) for task, texts in gold]


@dataclasses.dataclass(frozen=True)
class RemoteLibrary:
    """See `token_episodes.Library`. Documents have ids, and neither title, text nor score."""

    engine: RemoteEngine  # the service
    # the last day that the date of a question's documents may be, as "YYYY-MM-DD"; "": no limit
    until: Callable[[ToolTask], str]

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first; a search that failed is a `Failure`."""
        wanted = [RemoteSearch(step.query, step.most, self.until(task)) for task, step in asked]
        return [
            found
            if isinstance(found, Failure)
            else tuple(Document(each, "", "", each in task.gold) for each in found)
            for (task, _), found in zip(asked, self.engine.search(wanted), strict=True)
        ]

    def open(self, task: ToolTask, step: Open) -> Failure:
        return Failure("request", f"{self.engine.title} is searched here, and gives no texts.", 0)

    def digest(self, task: ToolTask) -> str:
        """Names all that decides what a query of this question finds, and no key."""
        return f"{self.engine.digest} until={self.until(task) or 'open'}"


# ---------------------------------------------------------------- a question's own documents


@dataclasses.dataclass(frozen=True)
class OwnLibrary:
    """See `token_episodes.Library`."""

    retriever: OwnRetriever

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        searches = [DocumentSearch(s.query, s.most, task.documents) for task, s in asked]
        return self.retriever.find(searches)

    def open(self, task: ToolTask, step: Open) -> Document | None:
        return next((each for each in task.documents if each.id == step.doc_id), None)


# ---------------------------------------------------------------- searches that were done before

_Key = tuple[str, str, int]


class KeptResults:
    """See `token_episodes.Library`; the results used longest ago are dropped first.

    A result is kept by what was searched (the digest of the collection, or the service with its
    date limit), by the query without needless blanks, and by how many documents were asked for.
    Failures are not kept. Letters keep their case, which Boolean operators need.
    """

    def __init__(self, library: Any, most: int) -> None:
        """`library` has a `digest` of a task, of all that decides what its queries find."""
        self.asked = self.searched = 0  # searches that were asked for, and that the library did
        self.library, self._most = library, most
        self._kept: OrderedDict[_Key, tuple[Document, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        keys = [
            (self.library.digest(task), one_line(step.query), step.most) for task, step in asked
        ]
        with self._lock:
            known = {key: self._kept[key] for key in keys if key in self._kept}
        new = {key: pair for key, pair in zip(keys, asked, strict=True) if key not in known}
        results = self.library.look([*new.values()]) if new else []
        found = known | dict(zip(new, results, strict=True))
        with self._lock:
            self.asked += len(asked)
            self.searched += len(new)
            for key in keys:
                if not isinstance(result := found[key], Failure):
                    self._kept[key] = result
                    self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return [_for_task(task, found[key]) for key, (task, _) in zip(keys, asked, strict=True)]

    def open(self, task: ToolTask, step: Open) -> Document | Failure | None:
        return self.library.open(task, step)


def _for_task(
    task: ToolTask, found: tuple[Document, ...] | Failure
) -> tuple[Document, ...] | Failure:
    """Whether a document is relevant is the task's matter, not the search's."""
    if isinstance(found, Failure):
        return found
    gold = set(task.gold)
    return tuple(each._replace(is_supporting=each.id in gold) for each in found)

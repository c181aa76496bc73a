"""Corpora that questions share, here or behind a service, as what an agent's tools read."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qrag_jax.data.sample import Passage, Sample, letters
from qrag_jax.environments.episode import Document, Look, Open, ToolTask
from qrag_jax.environments.queries import BY_PASSAGE, BY_TITLE, QueryState, normalised_title
from qrag_jax.environments.tasks import document_text
from qrag_jax.errors import InputError
from qrag_jax.llm.endpoint import Endpoint, check_url
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.retrieval.corpus import StoredCorpus, names_of
from qrag_jax.retrieval.own_documents import OwnRetriever
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.runtime.run import log

if TYPE_CHECKING:  # not every library is searched by them
    from qrag_jax.retrieval.multi_step import SingleStepSearch
    from qrag_jax.retrieval.pubmed import RemoteEngine

_SERVICE_SECONDS = 60.0  # that a server may take to answer


@dataclasses.dataclass(frozen=True)
class CorpusLibrary:
    """See `token_episodes.Library`. The ids of documents are the passages' names."""

    corpus: StoredCorpus  # the passages
    searched: SingleStepSearch  # their index
    clean: bool = True  # whether quotes are made straight, as in a question's own documents

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first. Equal queries are searched once."""
        if not asked:
            return []
        queries = list(dict.fromkeys(step.query for _, step in asked))
        hits = self.searched.search(queries, max(step.most for _, step in asked))
        hits_of_query = dict(zip(queries, hits, strict=True))
        return [
            tuple(
                self._document(Passage(hit.id, hit.text, hit.title), hit.score)
                for hit in hits_of_query[step.query][: step.most]
            )
            for _, step in asked
        ]

    def open(self, task: ToolTask, step: Open) -> tuple[Document, ...]:
        return self.named((step.doc_id,))

    def named(self, names: Sequence[str]) -> tuple[Document, ...]:
        """The passages of these names, in their order, without those that are not there."""
        numbers = self.corpus.numbers(names)
        passages = self.corpus.passages(numbers[numbers != NONE])
        return tuple(map(self._document, passages))

    def _document(self, passage: Passage, score: float = 0.0) -> Document:
        text = document_text(passage.title, passage.text, self.clean)
        return Document(passage.name, passage.title, text, score=score)


class ServiceLibrary:
    """See `token_episodes.Library`: a server as Search-R1's, whose gold is known by its text."""

    def __init__(self, url: str) -> None:
        check_url(url, "config.search.index", "http://127.0.0.1:8000/retrieve", "")
        self._url, self._server = url, Endpoint(url.rstrip("/").removesuffix("/retrieve"))

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first. Equal queries are searched once."""
        if not asked:
            return []
        queries = list(dict.fromkeys(step.query for _, step in asked))
        most = max(step.most for _, step in asked)
        body = {"queries": queries, "topk": most, "return_scores": True}
        reply = self._server.post("/retrieve", body, _SERVICE_SECONDS)
        try:
            hits_of_query = dict(zip(queries, reply.json["result"], strict=True))
            return [_served(task, hits_of_query[step.query][: step.most]) for task, step in asked]
        except (KeyError, TypeError, ValueError, AttributeError):
            why = f"{self._url} gives no documents in Search-R1's form ({reply.reason})."
            return [Failure("server", why)] * len(asked)

    def open(self, task: ToolTask, step: Open) -> Failure:
        """A `Failure`: the server searches alone."""
        return Failure("request", f"{self._url} is searched here, and opens no document.", 0)


def _served(task: ToolTask, hits: Sequence[Mapping[str, Any]]) -> tuple[Document, ...]:
    gold = {letters(d.text): d.id for d in task.documents if d.is_supporting}
    documents = []
    for hit in hits:
        # The first line is the title, in quotes.
        title, _, text = hit["document"]["contents"].partition("\n")
        title = title.strip('"')
        name = gold.get(letters(whole := document_text(title, text, True)))
        place = name or f"passage {hit['document'].get('id', whole)}"
        documents.append(Document(place, title, whole, score=hit["score"]))
    return tuple(documents)


def on_corpus(tasks: Iterable[ToolTask], corpus: StoredCorpus) -> list[ToolTask]:
    """The tasks without documents of their own: their gold documents are passages of the corpus.

    Passages are found by their text. A question of which the corpus lacks a gold document has no
    `gold_ids`, because no search could find all of them.
    """
    gold = [(task, [d.text for d in task.documents if d.is_supporting]) for task in tasks]
    names = names_of(corpus, (text for _, texts in gold for text in texts))

    def ids(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[text] for text in texts) if names.keys() >= set(texts) else ()

    ready = [dataclasses.replace(task, documents=(), gold_ids=ids(texts)) for task, texts in gold]
    if without := sum(not task.gold_ids for task in ready):
        log(
            f"{without} of {len(ready)} questions have a gold document that is not in the corpus; "
            "their recall counts as 0, and citations as right"
        )
    return ready


def states_on(
    questions: Sequence[Sample], corpus: StoredCorpus, by: str, max_missing_share: float = 0.0
) -> list[QueryState]:
    """The states before the first hop; a line says what the corpus lacks.

    States are those of the questions all of whose gold pages are in the corpus; the others no
    search could solve. By title, all passages of a page are its gold passages, and pages of one
    title are one page. By passage, each gold passage is a page: the one with its id if the data
    name that, or else with its text.

    Args:
        by: one of `queries.KEYS`, by which `queries.key_of` keys what is found, too.
        max_missing_share: of the questions, those of which the corpus may lack a gold page.
    """
    what, other = ("title", BY_PASSAGE) if by == BY_TITLE else ("text", BY_TITLE)
    for question in questions:
        for page in question.gold:
            if not (page.title if by == BY_TITLE else page.text or page.name):
                raise InputError(
                    f"question {question.id}: a gold page has no {what}; use search.gold_by={other}"
                )
    pages = [page for question in questions for page in question.gold]
    names = _by_title(pages, corpus) if by == BY_TITLE else _by_passage(pages, corpus)
    states: list[QueryState] = []
    lacking: list[str] = []
    for question in questions:
        missing = next((page for page in question.gold if page not in names), None)
        if missing is not None:
            lacking.append(f"{missing.title or missing.whole!r} of {question.id}")
            continue
        gold = tuple(dict.fromkeys(name for page in question.gold for name in names[page]))
        titles = dict.fromkeys(normalised_title(page.title) for page in question.gold)
        states.append(
            QueryState(
                question.id,
                question.question,
                question.answers,
                hops=len(titles if by == BY_TITLE else gold),
                gold_ids=gold,
                pages=tuple(titles) if by == BY_TITLE else gold,
                source=question.source,
            )
        )
    first = f"the first is {lacking[0]}" if lacking else ""
    if not states or len(lacking) > max_missing_share * len(questions):
        raising = f", or raise config.search.max_missing_share, {max_missing_share}"
        raise InputError(
            f"the corpus lacks a gold page of {len(lacking)} of {len(questions)} questions "
            f"({first}); give the corpus that they are about in config.search.index"
            f"{raising if states else ''}."
        )
    if lacking:
        left_out = f"{len(lacking)} of {len(questions)} questions left out"
        log(f"{left_out}, of which the corpus lacks a gold page; {first}")
    return states


def _by_title(pages: Iterable[Passage], corpus: StoredCorpus) -> dict[Passage, tuple[str, ...]]:
    """The ids of the passages of each page; all passages are read."""
    wanted = {page: normalised_title(page.title) for page in pages}
    names: dict[str, list[str]] = {key: [] for key in wanted.values() if key}
    for passage in corpus:
        key = normalised_title(passage.title)
        if key in names:
            names[key].append(passage.name)
    return {page: tuple(names[key]) for page, key in wanted.items() if names.get(key)}


def _by_passage(pages: Iterable[Passage], corpus: StoredCorpus) -> dict[Passage, tuple[str, ...]]:
    wanted = dict.fromkeys(pages)
    named = [page.name for page in wanted if page.name]
    numbers = corpus.numbers(named)
    there = {name for name, number in zip(named, numbers, strict=True) if number != NONE}
    by_text = names_of(corpus, (page.whole for page in wanted if not page.name))
    names: dict[Passage, tuple[str, ...]] = {}
    for page in wanted:
        name = page.name if page.name in there else by_text.get(page.whole)
        if name is not None:
            names[page] = (name,)
    return names


@dataclasses.dataclass(frozen=True)
class RemoteLibrary:
    """See `token_episodes.Library`. Documents have ids, and neither title, text nor score."""

    engine: RemoteEngine  # the service

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first; a search that failed is a `Failure`."""
        wanted = [(step.query, step.most, task.until) for task, step in asked]
        return [
            names if isinstance(names, Failure) else tuple(Document(name, "", "") for name in names)
            for names in self.engine.search(wanted)
        ]

    def digest(self, task: Sample) -> str:
        """Names all that decides what a query of this question finds, and no key."""
        return f"{self.engine.digest} until={task.until or 'open'}"


# ---------------------------------------------------------------- a question's own documents


@dataclasses.dataclass(frozen=True)
class OwnLibrary:
    """See `token_episodes.Library`."""

    retriever: OwnRetriever

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        return self.retriever.find([(s.query, s.most, task.documents) for task, s in asked])

    def open(self, task: ToolTask, step: Open) -> tuple[Document, ...]:
        return tuple(document for document in task.documents if document.id == step.doc_id)


# ---------------------------------------------------------------- searches that were done before

_Key = tuple[str, str, int]


class KeptResults:
    """See `token_episodes.Library`; the results used longest ago are dropped first.

    A result is kept by the library's `digest` of the task, of all that decides what its queries
    find, by the query without needless blanks, and by how many documents were asked for. Failures
    are not kept. Letters keep their case, which Boolean operators need.
    """

    def __init__(self, library: Any, most: int) -> None:
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
        results_by_key = known | dict(zip(new, results, strict=True))
        with self._lock:
            self.asked += len(asked)
            self.searched += len(new)
            for key in keys:
                if not isinstance(result := results_by_key[key], Failure):
                    self._kept[key] = result
                    self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return [results_by_key[key] for key in keys]


@dataclasses.dataclass(frozen=True)
class Collections:
    """See `token_episodes.Library`: each task searches the collection it names, if it is there."""

    by_name: Mapping[str, CorpusLibrary]

    def has(self, task: Any) -> bool:
        return task.collection in self.by_name

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first; each collection is searched once."""
        documents: dict[int, tuple[Document, ...] | Failure] = {}
        for name, library in self.by_name.items():
            places = [n for n, (task, _) in enumerate(asked) if task.collection == name]
            if places:
                documents |= zip(places, library.look([asked[n] for n in places]), strict=True)
        return [documents.get(n, ()) for n in range(len(asked))]

    def digest(self, task: Sample) -> str:
        return self.by_name[task.collection].corpus.digest if self.has(task) else "nothing"


SearchLibrary = Collections | RemoteLibrary

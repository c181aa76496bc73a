"""What rewritten queries search: one corpus, several with a name each, or a service on the web."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from qrag_jax.data.files.corpora import read_corpus
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Document, Look, Open, ToolTask
from qrag_jax.errors import InputError, check_known, check_least, check_share
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.bm25 import check_words
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.opening import BM25
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.retrieval.pubmed import RemoteEngine, RemoteEngineConfig
from qrag_jax.rollouts.corpus_library import CorpusLibrary, RemoteLibrary
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems import query_search
from qrag_jax.systems.query_search import SearchConfig, SearchFields, open_passages

REMOTE = "remote"
ENGINES = (*query_search.ENGINES, REMOTE)
OWN = "own"  # folder of the collection without a name, which files of rows search


@dataclasses.dataclass(frozen=True)
class RewriteSearchConfig(SearchFields):
    """Section `search`: what queries find."""

    # bm25 compares words, semantic vectors; hybrid fuses both by their ranks; boolean obeys AND,
    # OR, NOT, parentheses and phrases; remote asks the service of section engine
    engine: str = BM25
    # Of queries in files of rows: a file or folder of documents (doc_id or _id, text), or a folder
    # of an index (qrag index). Folders in BEIR's layout have a corpus of their own
    corpus: str = ""
    index: str = ""  # see corpus
    # Queries of which the corpus may lack every relevant document, a share; above it the run is
    # refused
    max_missing_share: float = 0.1
    k1: float = 0.9
    b: float = 0.4
    stemmer: str = ""
    stop_words: str = ""
    kept: int = 100_000  # results of searches that are kept in memory

    def __post_init__(self) -> None:
        check_known("search", self, "engine", ENGINES)
        check_words("search", self)
        if self.corpus and self.index:
            raise InputError(
                "config.search.corpus and config.search.index are both given; leave one empty."
            )
        check_least("search", self, kept=0)
        if self.engine == REMOTE:
            if self.corpus or self.index or self.encoder:
                raise InputError(
                    f"config.search.engine is {REMOTE!r}, which searches no corpus of yours; leave "
                    "config.search.corpus, index and encoder empty."
                )
            check_share("search", self, "max_missing_share")
        else:
            self.of_index("")

    def of_index(self, index: str) -> SearchConfig:
        """The same for one index; "": a corpus in the run's folder."""
        names = (field.name for field in dataclasses.fields(SearchFields))
        return SearchConfig(**{name: getattr(self, name) for name in names} | {"index": index})


@dataclasses.dataclass(frozen=True)
class Collections:
    """See `token_episodes.Library`: each task searches the collection that it names."""

    by_name: Mapping[str, CorpusLibrary]

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first; each collection is searched once."""
        found: dict[int, tuple[Document, ...] | Failure] = {}
        for name, library in self.by_name.items():
            places = [n for n, (task, _) in enumerate(asked) if collection_of(task) == name]
            if places:
                found |= zip(places, library.look([asked[n] for n in places]), strict=True)
        return [found[n] for n in range(len(asked))]

    def open(self, task: ToolTask, step: Open) -> Document | Failure | None:
        """The document of this id in the task's collection."""
        return self.by_name[collection_of(task)].open(task, step)

    def digest(self, task: ToolTask) -> str:
        """Of what a query of this task searches."""
        return self.by_name[collection_of(task)].corpus.digest


SearchLibrary = Collections | RemoteLibrary


def collection_of(task: ToolTask) -> str:
    """The name of the collection that a task searches."""
    assert isinstance(task, RewriteTask)
    return task.collection


def until_of(task: ToolTask) -> str:
    """The last day of publication that a search for a task may find."""
    assert isinstance(task, RewriteTask)
    return task.until


def open_remote(config: RemoteEngineConfig) -> RemoteLibrary:
    """The service on the web; nothing is asked yet."""
    return RemoteLibrary(RemoteEngine(config), until_of)


def open_collections(
    config: RewriteSearchConfig,
    wanted: Mapping[str, Callable[[], Iterable[Passage]]],
    folder: Path,
    stop: StopSignal | None = None,
    *,
    begun: bool = True,
) -> Collections:
    """Opens the collections; those that are not indexed yet are indexed in the run's folder.

    Args:
        wanted: name → its passages, read if they are not there; of the name "" if the config names
            an index, that is opened.
        folder: for corpora and indexes, one folder for each name.
        stop, begun: see `query_search.open_query_search`.
    """
    found = {}
    for name, passages in wanted.items():
        index = config.index if not name else ""
        own = folder / (name or OWN)
        listed, of_index = partial(_listed, passages), config.of_index(index)
        found[name] = open_passages(of_index, listed, own, stop, begun=begun)
    return Collections(found)


def _listed(given: Callable[[], Iterable[Passage]]) -> list[Passage]:
    return [*given()]


def passages_of(path: str) -> Iterable[Passage]:
    """The documents of a corpus file, or of a folder in BEIR's layout, without those of no word.

    Old collections have some; no search could find them.
    """
    empty = 0
    for each in read_corpus(Path(path).expanduser()):
        passage = Passage(*each.document)
        if passage.whole:
            yield passage
        else:
            empty += 1
    if empty:
        log(f"{path}: {empty} document(s) without title and text left out")


def ids_in(corpus: StoredCorpus, ids: Iterable[str]) -> set[str]:
    """Those of the ids that a corpus has."""
    given = [*dict.fromkeys(ids)]
    numbers = corpus.numbers(given)
    return {name for name, number in zip(given, numbers, strict=True) if number >= 0}

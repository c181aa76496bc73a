"""What a training searches: passages that its questions bring, a corpus, or an index.

Passages are written into the run's folder as a corpus with the indexes that its engine needs, in
the layout of `systems.indexing`. A run that goes on finds it there, and refuses other passages.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from qrag_jax.data.corpora import Columns, read_corpus
from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import Document, Look
from qrag_jax.environments.queries import BY_TITLE, KEYS
from qrag_jax.errors import InputError, Natural, Share, Weight, one_of
from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.retrieval import corpus, index_folder
from qrag_jax.retrieval.bm25 import STEMMER, STOPPED, BM25Config, BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus, write_corpus
from qrag_jax.retrieval.index_folder import BM25, BOOLEAN, CORPUS, HYBRID, OF_WORDS, IndexAt
from qrag_jax.retrieval.own_documents import LEXICAL, RETRIEVERS, SEMANTIC
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.libraries import CorpusLibrary, RemoteLibrary
from qrag_jax.runtime import hosts
from qrag_jax.runtime.run import log
from qrag_jax.systems.retriever import BY_VECTORS, PlainEncoder, open_plain

REMOTE = "remote"
OWN = "own"  # folder of the collection without a name, which files of rows search
# Retriever → engine; "": the usual of vectors.
_ENGINES = {BM25: BM25, LEXICAL: BM25, SEMANTIC: "", HYBRID: HYBRID, BOOLEAN: BOOLEAN}


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Section `search` of query writers and rewriters."""

    # Folder of an index (qrag index) that all questions search; "": see corpus
    index: str = ""
    # File or folder of passages, as qrag index reads it; "": those that the questions bring. Of
    # rewriters it is what files of rows search: folders in BEIR's layout have a corpus of their own
    corpus: str = ""
    # bm25 compares words, semantic vectors; hybrid fuses both by their ranks; boolean: words, with
    # AND, OR, NOT, parentheses and "phrases" carried out; remote: the service of section engine
    engine: Annotated[str, one_of((BM25, SEMANTIC, HYBRID, BOOLEAN, REMOTE))] = BM25
    encoder: str = ""  # folder or hub name of what embeds for semantic and hybrid
    question_prefix: str = ""  # of that encoder: text before queries, such as "query: "
    passage_prefix: str = ""  # and before passages; of an index, as it was built
    # Questions of which the corpus may lack a gold page, a share; above it the run is refused
    max_missing_share: Share = 0.1
    k1: Weight = 1.5  # BM25 of a corpus; an index has its own: weight of repeated words
    b: Share = 0.75  # how much long passages are held back, 0 to 1
    # a language of Snowball, or porter; "": words stay whole
    stemmer: Annotated[str, STEMMER] = "english"
    stop_words: Annotated[str, STOPPED] = "english"  # words left out, those of a language; "": none
    # What a gold page is known by: its title, or the passage itself where titles are not unique
    gold_by: Annotated[str, one_of(KEYS)] = BY_TITLE
    clean: bool = False  # ``TeX'' quotes in passages become "straight" ones
    kept: Natural = 100_000  # results of searches that are kept in memory

    def __post_init__(self) -> None:
        if self.engine in (SEMANTIC, HYBRID) and not self.encoder:
            raise InputError(
                f"config.search.engine is {self.engine!r}; give config.search.encoder, too."
            )
        if self.corpus and self.index:
            raise InputError(
                "config.search.corpus and config.search.index are both given; leave one empty."
            )

    @property
    def words(self) -> BM25Config:
        """How BM25 over a corpus finds and weighs words."""
        return BM25Config(k1=self.k1, b=self.b, stemmer=self.stemmer, stop_words=self.stop_words)


def open_search(
    config: SearchConfig,
    passages: Callable[[], Iterable[Passage]] | None,
    folder: Path,
    *,
    begun: bool = True,
) -> CorpusLibrary:
    """Opens what is searched; passages are written and indexed first, if they are not there.

    Args:
        passages: called if the config names neither an index nor a corpus; None: those that the
            folder has.
        begun: whether the run has begun; else the folder is of a start that was refused, and
            passages that differ take their place.
    """
    encoder = prefixed(config)
    if config.corpus and passages is not None:
        passages = partial(passages_of, config.corpus)
    if not config.index:
        own = None if passages is None else [*passages()]
        hosts.first_does(lambda: _store(own, folder, begun=begun))
        if config.engine != SEMANTIC:
            hosts.first_does(lambda: _index_words(config, folder))
        if config.engine not in OF_WORDS:
            from qrag_jax.systems import indexing  # which brings engines that words do not need

            of, there = indexing.PassageEncoder.of_folder, indexing.vectors_are_finished(folder)
            tower = None if there else of(encoder.path, encoder.config)
            indexing.index_corpus(None, folder, tower)
    where = config.index or str(folder)
    return open_index(where, config.engine, encoder, "config.search", clean=config.clean)


def open_index(
    where: str, retriever: str, encoder: PlainEncoder, section: str, *, clean: bool
) -> CorpusLibrary:
    """Opens the index that all questions share; `section`: of the config, for messages."""
    folder = index_folder.version(Path(where).expanduser())
    if not (folder / CORPUS).is_dir():
        raise InputError(
            f"{section} names {where}, which holds no index; build one there with qrag index."
        )
    stored, engine = StoredCorpus(folder / CORPUS), _ENGINES.get(retriever)
    if engine is None:
        # Boolean search is the query writers' alone.
        both = (name for name in RETRIEVERS if name in _ENGINES)
        raise InputError(
            f"the retriever {retriever!r} is for a question's own documents; with the index of "
            f"{section} use one of {', '.join(both)}."
        )
    by_words = engine in OF_WORDS
    if not (by_words or encoder.path):
        raise InputError(
            f"the retriever {retriever!r} compares vectors; name the encoder that {where} was "
            f"indexed with in {section}.encoder, or use bm25."
        )
    usable = OF_WORDS if by_words else BY_VECTORS
    index = IndexAt(folder, engine).settled(usable, f"change what searches in {section}")
    return CorpusLibrary(stored, open_plain(index, None if by_words else encoder), clean)


def prefixed(section: Any) -> PlainEncoder:
    """The encoder of a section with the fields encoder, question_prefix and passage_prefix."""
    prefixes = {"state_prefix": section.question_prefix, "chunk_prefix": section.passage_prefix}
    return PlainEncoder(section.encoder, EncoderConfig(**prefixes))


def _store(passages: Sequence[Passage] | None, folder: Path, *, begun: bool) -> None:
    own = folder / CORPUS
    if there := (own / corpus.NAME).exists():
        pairs = itertools.zip_longest(StoredCorpus(own), passages or ())
        if passages is None or all(a == b for a, b in pairs):
            return
        if begun:
            raise InputError(
                f"{own} holds other passages than the questions bring now; give the data that the "
                "run began with, or another --workdir."
            )
    if passages is None:
        raise InputError(f"{own} has no pooled passages; train there first.")
    if not passages:
        raise InputError("the questions bring no passages; name an index in config.search.index.")
    if there:
        log(f"{folder} is of a start that was refused and had other passages; it is written again")
        shutil.rmtree(folder)  # with its indexes
    shutil.rmtree(own, ignore_errors=True)  # it is not finished
    write_corpus(own, passages)


def _index_words(config: SearchConfig, folder: Path) -> None:
    stored, own = StoredCorpus(folder / CORPUS), folder / BM25
    if (own / index_folder.NAME).exists():
        if BM25Index.open(own, stored).config == config.words:
            return
        shutil.rmtree(own)
    BM25Index.build(stored, config.words).save(own)


# ---------------------------------------------------------------- collections of query rewriters


@dataclasses.dataclass(frozen=True)
class Collections:
    """See `token_episodes.Library`: each task searches the collection it names, if it is there."""

    by_name: Mapping[str, CorpusLibrary]

    def has(self, task: Any) -> bool:
        return task.collection in self.by_name

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first; each collection is searched once."""
        found: dict[int, tuple[Document, ...] | Failure] = {}
        for name, library in self.by_name.items():
            places = [n for n, (task, _) in enumerate(asked) if task.collection == name]
            if places:
                found |= zip(places, library.look([asked[n] for n in places]), strict=True)
        return [found.get(n, ()) for n in range(len(asked))]

    def digest(self, task: Sample) -> str:
        return self.by_name[task.collection].corpus.digest if self.has(task) else "nothing"


SearchLibrary = Collections | RemoteLibrary


def open_collections(
    config: SearchConfig,
    wanted: Mapping[str, Callable[[], Iterable[Passage]] | None],
    folder: Path,
    *,
    begun: bool = True,
) -> Collections:
    """Opens the collections; those that are not indexed yet are indexed in the run's folder.

    `wanted`: name → its passages, which are read if they are not there. The index or the corpus of
    the config is the collection of the name "".
    """
    named, found = dataclasses.replace(config, index="", corpus=""), {}
    for name, passages in wanted.items():
        own = named if name else config
        found[name] = open_search(own, passages, folder / (name or OWN), begun=begun)
    return Collections(found)


def passages_of(path: str) -> Iterable[Passage]:
    """The documents of a corpus without those of no word, which old collections have."""
    empty = 0
    for _, passage in read_corpus(Path(path).expanduser(), Columns()):
        if passage.whole:
            yield passage
        else:
            empty += 1
    if empty:
        log(f"{path}: {empty} document(s) without title and text left out")

"""What a training searches: a question's documents, those of all questions, a corpus, an index.

Passages of the questions are written into the run's folder with the indexes that the engine needs,
in the layout of `systems.indexing`. A run that goes on finds them there. A corpus is indexed once
for all runs, in the user's cache.

An index may also give Q-RAG hard negatives: passages that a search takes for good. What was found
is kept in the run's folder, so a run that goes on trains on the same passages without a search.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from qrag_jax.data.corpora import corpus_files
from qrag_jax.data.sample import LazySamples, Sample, fingerprint
from qrag_jax.environments.queries import BY_TITLE, KEYS
from qrag_jax.errors import InputError, Natural, Share, Weight, one_of
from qrag_jax.llm.config import RerankerConfig
from qrag_jax.retrieval import corpus, index_folder, own_documents
from qrag_jax.retrieval.bm25 import STEMMER, STOPPED, BM25Config
from qrag_jax.retrieval.corpus import StoredCorpus, write_corpus
from qrag_jax.retrieval.index_folder import BM25, BOOLEAN, CORPUS, EXACT, HYBRID, OF_WORDS
from qrag_jax.retrieval.own_documents import LEXICAL, RETRIEVERS, SEMANTIC
from qrag_jax.retrieval.protocol import NONE, Passage
from qrag_jax.rollouts.libraries import CorpusLibrary, OwnLibrary, ServiceLibrary
from qrag_jax.runtime import config_fields, hosts, interrupt
from qrag_jax.runtime.retriever_config import TITLE_SEPARATOR, passage_text
from qrag_jax.runtime.run import log
from qrag_jax.runtime.whole_files import default_cache, replacing, sha256

if TYPE_CHECKING:  # they bring engines that a question's own documents do not need
    from qrag_jax.data.loading import LoadedSamples, NegativesConfig
    from qrag_jax.retrieval.multi_step import Hit
    from qrag_jax.systems.indexing import PassageEncoder
    from qrag_jax.systems.retriever import PlainEncoder

REMOTE = "remote"
OWN = "own"  # folder of the collection without a name, which files of rows search
BY_VECTORS = (SEMANTIC, index_folder.FAISS, index_folder.QDRANT, index_folder.MILVUS)
OF_CORPORA = (BM25, *BY_VECTORS, HYBRID, BOOLEAN, index_folder.MILVUS_BM25)
_OTHERWISE = {LEXICAL: BM25, SEMANTIC: ""}  # what `IndexAt` calls them; "": the usual of vectors
_WAIT = 60.0  # seconds that a search waits for a rerank service that is down


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Section `search` of systems that search open corpora."""

    # Folder of an index (qrag index) that all questions search, or, of RLVR, the URL of a server in
    # the form of Search-R1's, such as qrag serve; "": see corpus
    index: str = ""
    # File or folder of passages, as qrag index reads it, which is indexed in the user's cache; "":
    # passages of all questions, and in RLVR those of each question for itself. Of rewriters it is
    # what files of rows search: folders in BEIR's layout have a corpus of their own
    corpus: str = ""
    # bm25 and milvus_bm25 compare words, semantic vectors, exactly; faiss, qdrant and milvus:
    # vectors, by what the index has of these; hybrid fuses the ranks of words and vectors; boolean:
    # words, with AND, OR, NOT, parentheses and "phrases" carried out; remote: the service of
    # section engine.
    # Of a question's own documents (RLVR): golden, bm25 (lexical), semantic, hybrid or interleaved
    engine: Annotated[str, one_of((*OF_CORPORA, REMOTE, *RETRIEVERS))] = BM25
    encoder: str = ""  # folder or hub name of what embeds for semantic, hybrid and interleaved
    question_prefix: str = ""  # of that encoder: text before queries, such as "query: "
    passage_prefix: str = ""  # and before passages; of an index, as it was built
    # Numbers of vectors on the devices: float32, bfloat16 or int8; "": as the index says, else
    # float32
    dtype: Annotated[str, one_of(("", "float32", "bfloat16", "int8"))] = ""
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
        if self.corpus and self.index:
            raise InputError("config.search.corpus and search.index are both given; empty one.")
        if self.engine in index_folder.SERVERS and not self.index:
            raise InputError(f"config.search.engine {self.engine!r} needs config.search.index.")

    @property
    def words(self) -> BM25Config:
        """How BM25 over a corpus finds and weighs words."""
        return BM25Config(k1=self.k1, b=self.b, stemmer=self.stemmer, stop_words=self.stop_words)

    @property
    def plain_encoder(self) -> PlainEncoder | None:
        """What embeds queries and passages; None: words are compared."""
        if self.engine in OF_WORDS or not self.encoder:
            return None
        from qrag_jax.systems.retriever import PlainEncoder

        return PlainEncoder.of(self.encoder, self.question_prefix, self.passage_prefix)

    @property
    def is_service(self) -> bool:
        return self.index.startswith(("http://", "https://"))


def of_corpus(search: SearchConfig, *further: str) -> tuple[tuple[Any, str, str], ...]:
    """Rules (`config.refuse`) of systems that read the passages that are searched."""
    known = (*OF_CORPORA, *further)
    engines = f"which is for a question's own documents; use one of {', '.join(known)}"
    folder = "whose passages cannot be read here; name the folder of an index"
    return (
        (search.engine not in known, "search.engine", engines),
        (search.is_service, "search.index", folder),
    )


def unread(*read: str) -> list[str]:
    """The fields of the section but these."""
    names = (field.name for field in dataclasses.fields(SearchConfig))
    return [f"search.{name}" for name in names if name not in read]


def open_search(
    config: SearchConfig,
    passages: Callable[[], Iterable[Passage]] | None,
    folder: Path,
    *,
    begun: bool = True,
    of_each: Mesh | None = None,
    reranker: RerankerConfig | None = None,
) -> Any:
    """The `token_episodes.Library` of a config; of indexes, built if need be, a `CorpusLibrary`.

    Args:
        passages, folder, begun: see `indexed`.
        of_each: if neither index nor corpus is given, each question searches its own documents,
            which this mesh embeds, or the reranker scores if it has a URL.
    """
    if config.is_service:
        return ServiceLibrary(config.index)
    if of_each is not None and not (config.index or config.corpus):
        scorer = _scorer(config, of_each, reranker)
        return OwnLibrary(own_documents.OwnRetriever(config.engine, scorer))
    from qrag_jax.systems.retriever import BY_VECTORS, open_plain

    if config.engine not in (*OF_CORPORA, LEXICAL):
        raise InputError(
            f"config.search.engine {config.engine!r} is for a question's own documents; with a "
            f"corpus or an index use one of {', '.join(OF_CORPORA)}."
        )
    encoder = config.plain_encoder
    if encoder is None and config.engine not in (LEXICAL, *OF_WORDS):
        raise InputError(f"config.search.engine {config.engine!r} needs config.search.encoder.")
    tower = None if encoder is None or config.index else encoder.passages
    where = indexed(config, passages, folder, tower, begun=begun)
    engine = _OTHERWISE.get(config.engine, config.engine)
    index = index_folder.IndexAt(where, engine, storage=config.dtype)
    usable = OF_WORDS if encoder is None else BY_VECTORS
    index = index.settled(usable, "change config.search.engine")
    return CorpusLibrary(StoredCorpus(where / CORPUS), open_plain(index, encoder), config.clean)


def _scorer(
    config: SearchConfig, mesh: Mesh, reranker: RerankerConfig | None
) -> own_documents.Scorer | None:
    if reranker is not None and reranker.url:
        from qrag_jax.llm.client import Client

        client = dataclasses.replace(reranker.client, wait_limit=_WAIT)
        return own_documents.endpoint_scorer(Client(client))
    if (encoder := config.plain_encoder) is None:
        return None
    embedder = dataclasses.replace(encoder, mesh=mesh).passages
    return own_documents.EmbeddingScorer(embedder, embedder.towers.chunks)


def indexed(
    config: SearchConfig,
    passages: Callable[[], Iterable[Passage]] | None,
    folder: Path,
    tower: PassageEncoder | None,
    *,
    begun: bool = True,
    stop: interrupt.StopSignal | None = None,
) -> Path:
    """The folder of what is searched, which is stored and indexed first if it is not there.

    Args:
        passages: called if the config names neither an index nor a corpus, and the folder has none
            of a run that has begun; None: it has some.
        tower: embeds passages; None: nothing does.
        begun: whether the folder is of a run that has begun; else passages that differ take the
            place of its own.
    """
    if config.index:
        where = index_folder.version(Path(config.index).expanduser())
        if not (where / CORPUS / corpus.NAME).is_file():
            raise InputError(
                f"config.search.index, {config.index}, holds no index; see qrag index."
            )
        return where
    source: Path | None = None
    if config.corpus:
        source, folder = Path(config.corpus).expanduser(), _cached(config, folder, tower)
    else:
        hosts.first_does(partial(_store, passages, folder, begun=begun))
    from qrag_jax.systems.indexing import IndexSettings, index_corpus

    how: Any = {"words": config.words, "skip_empty": True}
    how |= {"dtype": config.dtype} if config.dtype else {}
    for engine in _engines(config, tower):
        if not (folder / engine / index_folder.NAME).exists():
            log(f"{config.corpus or 'the passages'}: indexing into {folder / engine}")
            there = (folder / CORPUS / corpus.NAME).exists()
            settings = IndexSettings(engine=engine, **how)
            index_corpus(None if there else source, folder, tower, settings, stop)
    return folder


def _engines(config: SearchConfig, tower: PassageEncoder | None) -> list[str]:
    by_words = tower is None or config.engine == HYBRID
    return [EXACT] * (tower is not None) + [BM25] * by_words


def _cached(config: SearchConfig, folder: Path, tower: PassageEncoder | None) -> Path:
    """Where the index of a corpus is kept: in the user's cache, by all that it is made of.

    Several hosts share no cache; theirs is in the run's folder.
    """
    if jax.process_count() > 1:
        return folder
    made_of = [sha256(path) for path in corpus_files(Path(config.corpus).expanduser())]
    made_of += [tower.digest(), config.dtype] if tower else []
    made_of += [repr(config.words)] if BM25 in _engines(config, tower) else []
    key = json.dumps([index_folder.FORMAT, made_of])
    return default_cache() / "indexes" / hashlib.sha256(key.encode()).hexdigest()[:16]


def _store(passages: Callable[[], Iterable[Passage]] | None, folder: Path, *, begun: bool) -> None:
    corpus_folder = folder / CORPUS
    if (there := (corpus_folder / corpus.NAME).exists()) and (begun or passages is None):
        return
    if passages is None:
        raise InputError(f"{corpus_folder} has no pooled passages; train there first.")
    new = [*passages()]
    if not new:
        raise InputError("the questions bring no passages; name an index in config.search.index.")
    if there and all(a == b for a, b in itertools.zip_longest(StoredCorpus(corpus_folder), new)):
        shutil.rmtree(folder / BM25, ignore_errors=True)  # other words may be wanted
        return
    if there:
        log(f"{folder} had other passages; it is written again")
        shutil.rmtree(folder)  # with its indexes
    shutil.rmtree(corpus_folder, ignore_errors=True)  # it is not finished
    write_corpus(corpus_folder, new)


# ---------------------------------------------------------------- hard negatives

FOUND = "negatives.npz"  # in the run's folder
_AT_ONCE = 256  # questions searched side by side
_SPARE = 8  # passages asked for beyond those wanted, since some are the question's own


def with_negatives(
    config: NegativesConfig, loaded: LoadedSamples, workdir: Path, separator: str = TITLE_SEPARATOR
) -> LoadedSamples:
    """The samples with `config.count` more passages each, behind their own.

    Left out are a question's own passages, and those that may be good though nobody has said so:
    passages with the title or the beginning of a supporting one, and passages that hold the answer
    (as in DPR, arXiv 2004.04906). If fewer are left, fewer are added.
    """
    from qrag_jax.data.loading import LoadedSamples

    for name, samples in loaded.by_source.items():
        if isinstance(samples, LazySamples):
            raise InputError(f"config.data.negatives.index: {name} makes its own documents.")
    folder = index_folder.version(Path(config.index).expanduser())
    corpus, samples = StoredCorpus(folder / CORPUS), list(loaded.all)
    negatives = _kept_negatives(workdir, config, corpus, samples)

    def longer(sample: Sample, numbers: np.ndarray) -> Sample:
        passages = corpus.passages(numbers[numbers != NONE])
        more = [passage_text(passage.title, passage.text, separator) for passage in passages]
        return dataclasses.replace(sample, chunks=(*sample.chunks, *more), titles=())

    all_longer = map(longer, samples, negatives)
    by_source: dict[str, Sequence[Sample]] = {
        name: [*itertools.islice(all_longer, len(part))] for name, part in loaded.by_source.items()
    }
    added = int((negatives != NONE).sum()) / max(len(samples), 1)
    line = f"negatives: {added:.1f} passages of {folder} for each question"
    return LoadedSamples(by_source, [*loaded.report, line])


def _kept_negatives(
    workdir: Path, config: NegativesConfig, corpus: StoredCorpus, samples: Sequence[Sample]
) -> np.ndarray:
    """The numbers of all samples' negatives, int64 `[samples, count]`, found once in a run."""
    path, settings = workdir / FOUND, [config.search, str(config.count), str(config.skip)]
    about = [corpus.digest, fingerprint(samples), *settings]

    def read() -> np.ndarray | None:
        with np.load(path) as file:
            return file["numbers"] if file["about"].tolist() == about else None

    def find() -> None:
        if not path.is_file() or read() is None:
            numbers = np.array(list(_searched(config, corpus, samples)), np.int64)
            with replacing(path) as file:
                np.savez(file, numbers=numbers, about=np.array(about))

    if not config_fields.has_begun(workdir):
        hosts.first_does(find)
    if (numbers := read()) is None:
        raise InputError(
            f"{workdir} was trained with passages of another corpus, or for other questions or "
            "settings of config.data.negatives; give those, or another --workdir."
        )
    return numbers


def _searched(
    config: NegativesConfig, corpus: StoredCorpus, samples: Sequence[Sample]
) -> Iterator[np.ndarray]:
    search = _open_negatives(config)
    with tqdm(desc="searching negatives", total=len(samples), unit=" questions") as bar:
        for first in range(0, len(samples), _AT_ONCE):
            part = samples[first : first + _AT_ONCE]
            most_chunks = max(len(sample.chunks) for sample in part)
            asked = min(config.count + config.skip + most_chunks + _SPARE, len(corpus))
            lists = search([sample.question for sample in part], asked)
            for sample, hits in zip(part, lists, strict=True):
                names = [hit.id for hit in hits if not may_be_good(sample, hit)]
                names = names[config.skip : config.skip + config.count]
                row = np.full(config.count, NONE, np.int64)
                row[: len(names)] = corpus.numbers(names)
                yield row
            bar.update(len(part))


def may_be_good(sample: Sample, hit: Hit) -> bool:
    """Whether a passage is one of the sample's own, or may hold what a supporting one does."""
    from qrag_jax.metrics.answers import has_answer, normalise, worded

    text = normalise(Passage(hit.id, hit.text, hit.title).whole)
    title = normalise(hit.title)
    for place, chunk in enumerate(sample.chunks):
        doc = normalise(chunk)
        if doc == text:
            return True
        if place in sample.support and (
            doc.startswith(text) or text.startswith(doc) or (title and doc.startswith(f"{title} "))
        ):
            return True
    return has_answer(text, worded(sample.answers))


def _open_negatives(config: NegativesConfig) -> Callable[[Sequence[str], int], list[list[Hit]]]:
    if config.search and jax.process_count() > 1:
        raise InputError(
            "config.data.negatives.search is given, but only words are searched on several hosts; "
            f"start the run on one host first, which keeps what it found in {FOUND}."
        )
    from qrag_jax.retrieval.multi_step import by_turns
    from qrag_jax.systems.retriever import Retriever, SingleStepRetriever

    retriever = Retriever.load(config.search or BM25)
    retriever.open(config.index)
    if isinstance(retriever, SingleStepRetriever):
        return retriever.engine.search
    # All steps are wanted, and one path: every step may be misled.
    greedy = dataclasses.replace(
        retriever.rules.search, beam=1, stop_threshold=None, stop_action=False
    )
    rules = dataclasses.replace(retriever.rules, search=greedy)

    def search(questions: Sequence[str], k: int) -> list[list[Hit]]:
        several = retriever.engine.with_rules(dataclasses.replace(rules, per_step=k))
        return [by_turns(hits) for hits in several.search(questions)]

    return search

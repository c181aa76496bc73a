"""A million passages: what each engine costs to build, to open and to search, beside its peers.

Passages are sentences of 2WikiMultihopQA's open corpus, shuffled, under new titles, so that words
occur as often as in real texts. A passage's vector is the mean of MiniLM's vectors of its sentences
with some noise: to embed a million passages would take hours, and a search does not see the
difference. Every stage is a process of its own, whose memory is measured. It runs only by its name,
`--only=million`: about an hour on two cores and 12 GB of disk.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Case
from benchmarks.speed.measure import Setting
from benchmarks.speed.search import STEPS, K, export_of, texts_of
from qrag_jax.data.corpora import read_corpus
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.retrieval.building import IndexSettings, make_faiss
from qrag_jax.retrieval.corpus import StoredCorpus, write_corpus
from qrag_jax.retrieval.index_folder import (
    BM25,
    BOOLEAN,
    CORPUS,
    EXACT,
    FAISS,
    HYBRID,
    OF_WORDS,
    SCAN,
    IndexAt,
    Manifest,
)
from qrag_jax.retrieval.protocol import Passage, Queries
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.indexing import PassageEncoder, embed_parts, index_corpus, parts_of
from qrag_jax.systems.retriever import Retriever

PASSAGES, QUICK = 1_000_000, 2_000
ONE, MANY = 20, 64  # questions asked one by one, and together
NOISE = 0.3  # length of what is added to a vector of length 1
# The approximate index: lists of neighbours, of which a search reads some.
LISTS, READ = 1024, 48
FILE, VECTORS, QUESTIONS, INDEX = "corpus.jsonl", "vectors.npy", "questions.json", "index"
ASKED, BEST, GRAPH = "asked.npy", "best.npy", "hnsw.faiss"


def million_cases(setting: Setting) -> Iterator[Case]:
    """Seconds and memory of each stage; milliseconds of a question, alone and of many."""
    count, folder = QUICK if setting.quick else PASSAGES, setting.folder / "million"
    folder.mkdir()
    export = export_of(setting)

    def stage(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as pool:
            return pool.submit(_measured, function, folder, *arguments).result()

    _write_texts(setting, folder, export, count)
    of = f"{count:,} passages"
    for name, build, arguments in (
        ("storing them", _store, ()),
        ("index of words", _words, ()),
        ("bm25s' index of words", _peer_words, ()),
        ("index of vectors", _vectors, (export,)),
        ("approximate index of FAISS", _approximate, (min(LISTS, count // 40),)),
        ("FAISS' HNSW32", _peer_graph, ()),
    ):
        built = stage(build, *arguments)
        yield Case(f"{of}: {name}", built.pop("seconds"), "s", details=built)
    for engine in (BM25, BOOLEAN, EXACT, SCAN, FAISS, HYBRID):
        searched = stage(_search, export, engine)
        yield Case(f"{of}: {engine}, a question", searched.pop("one"), "ms", details=searched)
    for engine in (EXACT, SCAN, FAISS):
        searched = stage(_in_steps, export, engine)
        yield Case(f"{of}: {engine}, a step", searched.pop("one"), "ms", details=searched)
    for peer in ("bm25s", "FAISS Flat", "FAISS HNSW32"):
        searched = stage(_search_peer, peer)
        yield Case(f"{of}: {peer}, a question", searched.pop("one"), "ms", details=searched)


def _measured(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here (proc(5))
    figures = function(*arguments)
    # Mapped files count as far as they were read.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return figures | ({"peak memory, GiB": int(peak[1]) / 2**20} if peak else {})


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


# ---------------------------------------------------------------- what is indexed


def _write_texts(setting: Setting, folder: Path, export: Path, count: int) -> None:
    texts = texts_of(setting, 10_000, ONE + MANY)
    (folder / QUESTIONS).write_text(json.dumps(texts.questions))
    sentences = sorted(
        {
            sentence
            for passage in texts.passages
            for sentence in re.split(r"(?<=[.!?]) +", passage.text)
            if len(sentence) > 20
        }
    )[: 200 if setting.quick else None]
    names = sorted({word for passage in texts.passages for word in passage.title.split()})
    encoder = PassageEncoder.of_folder(str(export / "chunk"), EncoderConfig(**setting.blocks))
    of_sentences = _unit(encoder.towers.chunks(sentences))
    rng = np.random.default_rng(0)
    shape = count, of_sentences.shape[1]
    vectors = np.lib.format.open_memmap(folder / VECTORS, "w+", np.float32, shape)
    with (folder / FILE).open("w") as file:
        for number in range(count):
            chosen = rng.integers(len(sentences), size=rng.integers(2, 6))
            words = (names[i] for i in rng.integers(len(names), size=2))
            text = " ".join(sentences[i] for i in chosen)
            row = {"id": f"p{number}", "title": " ".join([*words, str(number)]), "text": text}
            file.write(json.dumps(row) + "\n")
            noise = rng.standard_normal(shape[1], np.float32) * (NOISE / shape[1] ** 0.5)
            vectors[number] = of_sentences[chosen].mean(axis=0) + noise
    for first in range(0, count, 2**16):
        vectors[first : first + 2**16] = _unit(vectors[first : first + 2**16])
    vectors.flush()


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _store(folder: Path) -> dict[str, float]:
    def passages() -> Iterator[Passage]:
        return (passage for _, passage in read_corpus(folder / FILE))

    return {"seconds": _timed(lambda: write_corpus(folder / INDEX / CORPUS, passages()))}


def _words(folder: Path) -> dict[str, float]:
    settings = IndexSettings(engine=BM25)
    return {"seconds": _timed(lambda: index_corpus(None, folder / INDEX, None, settings))}


def _vectors(folder: Path, export: Path) -> dict[str, float]:
    """Writes the vectors as `qrag index` does, but for embedding."""
    rows = np.load(folder / VECTORS, mmap_mode="r")
    corpus = StoredCorpus(folder / INDEX / CORPUS)
    digest = PassageEncoder.of_folder(str(export / "chunk")).digest()
    about = corpus.digest, len(rows), digest, rows.shape[1], "float32"
    manifest = Manifest(EXACT, *about, settings={"storage": "float32"})

    def write() -> None:
        parts = parts_of(folder / INDEX / EXACT, manifest, None, IndexSettings(), len(rows))
        there = (rows[first : first + 2**14] for first in range(0, len(rows), 2**14))
        embed_parts(corpus, None, parts, IndexSettings(), StopSignal(), there=there)

    return {"seconds": _timed(write)}


def _approximate(folder: Path, lists: int) -> dict[str, float]:
    corpus = StoredCorpus(folder / INDEX / CORPUS)
    made_as = f"IVF{lists},Flat"
    how = made_as, made_as, f"nprobe={READ}"
    return {"seconds": _timed(lambda: make_faiss(folder / INDEX, corpus, *how))}


# ---------------------------------------------------------------- searches


def _search(folder: Path, export: Path, engine: str) -> dict[str, float]:
    start = time.perf_counter()
    index = IndexAt(folder / INDEX, engine).open()
    opened = time.perf_counter() - start
    questions = json.loads((folder / QUESTIONS).read_text())
    vectors = None
    if engine not in OF_WORDS:
        vectors = PassageEncoder.of_folder(str(export / "chunk"))(questions)
        np.save(folder / ASKED, vectors)
    if engine == BOOLEAN:  # two rare words of each
        questions = [" AND ".join(sorted(q.split(), key=len)[-2:]) for q in questions]
    asked = [
        Queries(questions[i:j], None if vectors is None else vectors[i:j])
        for i, j in [*((i, i + 1) for i in range(ONE)), (ONE, ONE + MANY)]
    ]
    figures = {"opening, s": opened, **_asked(lambda queries: index.search(queries, K), asked)}
    if engine == EXACT:
        np.save(folder / BEST, index.search(asked[-1], K).scores)
    if engine == FAISS:
        best = np.load(folder / BEST)[:, -1:]
        found = index.search(asked[-1], K).scores >= best - 1e-5
        figures["recall@10 of exact"] = float(found.mean())
    return figures


def _asked(search: Callable[[Any], object], asked: Sequence[Any]) -> dict[str, float]:
    """The first of them once more before the others: programs compile, files are mapped."""
    *alone, together = asked
    first = _timed(lambda: search(alone[0]))
    one = statistics.median(_timed(partial(search, queries)) for queries in alone)
    search(together)
    many = min(_timed(lambda: search(together)) for _ in range(3))
    return {"one": 1e3 * one, f"of {MANY}, ms": 1e3 * many / MANY, "first, s": first}


def _in_steps(folder: Path, export: Path, engine: str) -> dict[str, float]:
    retriever = Retriever.load(export)
    opened = _timed(lambda: retriever.open(folder / INDEX, engine))
    questions = json.loads((folder / QUESTIONS).read_text())
    asked = [*([question] for question in questions[:ONE]), questions[ONE:]]
    figures = _asked(lambda part: retriever.search(part, STEPS), asked)
    of_step = {name: value / STEPS for name, value in figures.items()}
    return {"opening, s": opened, **of_step}


# ---------------------------------------------------------------- peers


def _peer_words(folder: Path) -> dict[str, float]:
    import bm25s
    import Stemmer

    texts = [passage.whole for _, passage in read_corpus(folder / FILE)]
    peer = bm25s.BM25(method="lucene")

    def build() -> None:
        stemmer = Stemmer.Stemmer("english")
        how: Any = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
        peer.index(bm25s.tokenize(texts, **how), show_progress=False)

    seconds = _timed(build)
    peer.save(folder / "bm25s")
    return {"seconds": seconds}


def _peer_graph(folder: Path) -> dict[str, float]:
    import faiss

    vectors = np.load(folder / VECTORS)
    graph = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    seconds = _timed(lambda: graph.add(vectors))
    faiss.write_index(graph, str(folder / GRAPH))
    return {"seconds": seconds}


def _search_peer(folder: Path, peer: str) -> dict[str, float]:
    questions = json.loads((folder / QUESTIONS).read_text())
    parts = [*(slice(i, i + 1) for i in range(ONE)), slice(ONE, ONE + MANY)]
    if peer == "bm25s":
        import bm25s
        import Stemmer

        start = time.perf_counter()
        words = bm25s.BM25.load(folder / "bm25s", mmap=True)
        opened = time.perf_counter() - start
        stemmer = Stemmer.Stemmer("english")

        def search(part: slice) -> object:
            how: Any = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
            tokens = bm25s.tokenize(questions[part], **how)
            return words.retrieve(tokens, k=K, show_progress=False, n_threads=2)

        return {"opening, s": opened, **_asked(search, parts)}
    import faiss

    vectors = np.load(folder / ASKED)
    index: Any
    start = time.perf_counter()
    if peer == "FAISS Flat":
        rows = np.load(folder / VECTORS)
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows)
    else:
        index = faiss.read_index(str(folder / GRAPH))
        index.hnsw.efSearch = 64
    opened = time.perf_counter() - start
    figures = _asked(lambda part: index.search(vectors[part], K), parts)
    found = index.search(vectors[parts[-1]], K)[0] >= np.load(folder / BEST)[:, -1:] - 1e-5
    return {"opening, s": opened, **figures, "recall@10 of exact": float(found.mean())}

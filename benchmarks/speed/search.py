"""Searches and indexing against faiss, NumPy, bm25s and sentence-transformers.

Passages and questions are 2WikiMultihopQA's open corpus in the folder QRAG_DATA, for words SciFact;
without them, and in quick sizes, they are invented. Towers are MiniLM's, untrained: training does
not change their speed. In quick sizes they are tiny.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import DATA
from benchmarks.report import Case
from benchmarks.speed.measure import OURS, Setting, beside, calling, equal, with_details
from configs import two_wiki
from qrag_jax.data.corpora import qrels_path, read_corpus, read_qrels, read_queries
from qrag_jax.data.records import read_records
from qrag_jax.data.sample import world
from qrag_jax.errors import InputError
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.models.first_encoder import FOLDER, EncoderConfig, ScratchConfig, make_scratch_folder
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus, write_corpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.faiss_index import FaissIndex
from qrag_jax.retrieval.protocol import Passage, Queries
from qrag_jax.runtime.pretrained_files import find_minilm
from qrag_jax.systems.indexing import CORPUS, PassageEncoder, index_corpus
from qrag_jax.systems.q_rag import run as q_rag_run
from qrag_jax.systems.q_rag.run import SavedRun

K = 10
SIZES = ((1_000_000, 384, 1), (1_000_000, 384, 64), (200_000, 1024, 64))
NUMPY_AT_ONCE = 64  # queries, whose scores of all passages are in memory at once
STEPS = 4


class Texts(NamedTuple):
    """Passages, and questions about them."""

    passages: list[Passage]
    questions: list[str]


def texts_of(setting: Setting, passages: int, questions: int) -> Texts:
    """So many of 2WikiMultihopQA's open corpus, or of an invented world."""
    folder = DATA / "2wikimultihopqa"
    if folder.exists() and not setting.quick:
        records = (record for _, record in read_records(folder / "open_corpus.jsonl.gz"))
        asked = (record["question"] for _, record in read_records(folder / "open_dev.jsonl.gz"))
        documents = [
            Passage(r["_id"], r["text"], r["title"]) for r in itertools.islice(records, passages)
        ]
        return Texts(documents, list(itertools.islice(itertools.cycle(list(asked)), questions)))
    invented = world().bridge_questions(0, "train", range(max(passages // 4, questions)))
    every = (
        Passage(f"{n}-{passage.id}", passage.text, passage.title)
        for n, question in enumerate(invented)
        for passage in question.passages
    )
    asked_for = [question.question for question in invented[:questions]]
    return Texts(list(itertools.islice(every, passages)), asked_for)


# ------------------------------------------------------------------------------ one search


class Numbered:
    """A corpus of passages that nobody reads."""

    def __init__(self, count: int) -> None:
        self._count, self.digest = count, f"{count} numbers"

    def __len__(self) -> int:
        return self._count


def exact_cases(setting: Setting) -> Iterator[Case]:
    """Queries/s over random vectors, against faiss' flat index and NumPy."""
    for count, width, batch in ((20_000, 64, 8),) if setting.quick else SIZES:
        rng = np.random.default_rng(0)
        vectors = rng.standard_normal((count, width), np.float32)
        asked = rng.standard_normal((batch, width), np.float32)
        queries = Queries([""] * batch, asked)
        corpus: Any = Numbered(count)
        ours, faiss = ExactIndex(corpus, vectors), FaissIndex.build(corpus, vectors)
        case = beside(
            setting,
            f"exact search, {count:,} × {width}, float32, top {K}, batch {batch}",
            batch,
            "queries/s",
            {
                OURS: calling(ours.search, queries, K),
                "faiss": calling(faiss.search, queries, K),
                "NumPy": calling(by_numpy, vectors, asked, K),
            },
            least=1.0 if batch > 1 else None,
        )
        same = ours.search(queries, K).numbers == by_numpy(vectors, asked, K)
        yield with_details(case, **{"same passages at the same ranks": float(same.mean())})


def by_numpy(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """int64 `[queries, k]`: the highest products, in no order among equal ones."""
    nearest = []
    for first in range(0, len(queries), NUMPY_AT_ONCE):
        scores = queries[first : first + NUMPY_AT_ONCE] @ vectors.T
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)
        nearest.append(np.take_along_axis(best, order, 1))
    return np.concatenate(nearest)


def bm25_cases(setting: Setting) -> Iterator[Case]:
    """Queries/s by words against bm25s itself, and nDCG@10 of both where there are judgements."""
    import bm25s
    import Stemmer

    folder, named = DATA / "ir" / "scifact", {}
    if folder.exists() and not setting.quick:
        named = read_queries(folder, "dev")
        passages = [passage for _, passage in read_corpus(folder)]
        texts = Texts(passages, list(named.values()))
    else:
        texts = texts_of(setting, 200 if setting.quick else 5_000, 16)
    corpus = write_corpus(setting.folder / "words" / CORPUS, iter(texts.passages))
    index, config = BM25Index.build(corpus), BM25Config()
    stemmer = Stemmer.Stemmer(config.stemmer)

    def words(of: list[str]) -> Any:
        return bm25s.tokenize(of, stopwords="en", stemmer=stemmer, show_progress=False)

    peer = bm25s.BM25(k1=config.k1, b=config.b, method="lucene")
    peer.index(words([passage.whole for passage in texts.passages]), show_progress=False)
    hits: dict[str, np.ndarray] = {}

    def ours(_: int) -> None:
        hits[OURS] = index.search(Queries(texts.questions), K).numbers

    def theirs(_: int) -> None:
        asked = words(texts.questions)
        hits["bm25s"] = peer.retrieve(asked, k=K, show_progress=False, return_as="documents")

    name = f"BM25, {len(texts.passages):,} passages, top {K}"
    case = beside(setting, name, len(texts.questions), "queries/s", {OURS: ours, "bm25s": theirs})
    same = float((hits[OURS][:, 0] == hits["bm25s"][:, 0]).mean())
    yield with_details(case, **{"share of equal first hits": same})
    if named:
        scores = {}
        for side, numbers in hits.items():
            rows = ([texts.passages[n].name for n in row if n >= 0] for row in numbers)
            rankings = dict(zip(named, rows, strict=True))
            qrels = read_qrels(qrels_path(folder, "dev"))
            (column,) = ranking_columns(rankings, qrels, ["ndcg@10"]).values()
            scores[side] = float(np.mean([*column.values()]))
        yield Case("BM25, SciFact", scores[OURS], "nDCG@10", peer=scores["bm25s"])


# ------------------------------------------------------------------------------ towers


class Towers(NamedTuple):
    """Exported towers, an index of passages, and questions."""

    export: Path
    indexed: Path
    corpus: Path
    texts: Texts

    def vectors(self) -> np.ndarray:
        """float32 `[passages, width]` of the index."""
        stored = StoredCorpus(self.indexed / CORPUS)
        return ExactIndex.open(self.indexed / "exact", stored).vectors(range(len(stored)))

    def state_texts(self) -> list[str]:
        """What each passage adds to a state."""
        return [f"{passage.title} {passage.text}".strip() for passage in self.texts.passages]


@cache
def export_of(setting: Setting) -> Path:
    """Two untrained towers of four steps as `qrag export` writes them.

    Raises:
        InputError: MiniLM cannot be had.
    """
    folder, model = setting.folder, find_minilm()
    if setting.quick:
        model, every = folder / "small", (p.whole for p in texts_of(setting, 60, 16).passages)
        make_scratch_folder(model, every, ScratchConfig(1, 32, 2, 500, 512), 0)
    if model is None:
        raise InputError("all-MiniLM-L6-v2 was found nowhere; the searches need it.")
    config = two_wiki.get_config("minilm")
    with config.unlocked():
        config.encoder.update(path=str(model), dtype="float32")
    assert config.env.max_steps == STEPS
    shutil.copytree(model, folder / "run" / FOLDER)
    run, export = SavedRun.open(folder / "run", config), folder / "export"
    export.mkdir()
    form = q_rag_run.row_form(run.loaded.encoder, run.config)
    for name in q_rag_run.TOWERS:
        q_rag_run.write_tower(run.loaded, name, form, run.untrained(), export / name)
    q_rag_run.retriever_config(run, run.untrained(), export, None).write(export)
    return export


@cache
def towers_of(setting: Setting) -> Towers:
    """The towers of `export_of`, and their index."""
    folder, export = setting.folder, export_of(setting)
    texts = texts_of(setting, *((60, 16) if setting.quick else (2_000, 1_000)))
    corpus = folder / "corpus.jsonl"
    names = ("id", "title", "text")
    lines = (
        json.dumps(dict(zip(names, (p.name, p.title, p.text), strict=True))) for p in texts.passages
    )
    corpus.write_text("".join(f"{line}\n" for line in lines))
    index_corpus(corpus, folder / "index", _encoder(setting, export))
    return Towers(export, folder / "index", corpus, texts)


def _encoder(setting: Setting, export: Path) -> PassageEncoder:
    return PassageEncoder.of_folder(str(export / "chunk"), EncoderConfig(**setting.blocks))


def index_cases(setting: Setting) -> Iterator[Case]:
    """Passages/s of an index from a file of texts, against sentence-transformers and numpy.save."""
    from sentence_transformers import SentenceTransformer

    towers = towers_of(setting)
    encoder = _encoder(setting, towers.export)
    model = SentenceTransformer(str(towers.export / "chunk"), device="cpu")
    texts, built = [passage.whole for passage in towers.texts.passages], setting.folder / "built"

    def ours(number: int) -> None:
        index_corpus(towers.corpus, built / str(number), encoder)

    def theirs(number: int) -> None:
        vectors = model.encode(texts, convert_to_numpy=True, show_progress_bar=False)
        np.save(setting.folder / f"vectors{number}.npy", vectors)

    name = f"index of {len(texts):,} passages"
    yield beside(
        setting,
        name,
        len(texts),
        "passages/s",
        {OURS: ours, "sentence-transformers": theirs},
        least=1.0,
    )
    theirs_of = np.load(setting.folder / "vectors0.npy")
    away = float(np.abs(towers.vectors() - theirs_of).max())
    yield equal(f"{name}: difference of the vectors", away, 1e-4)

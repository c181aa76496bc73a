"""What every engine of search does, in the folder that a user opens it from.

A new engine is tested by registering it here: how its files are written, and a slow search that
says what it finds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import index_folder
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index, Words
from qrag_jax.retrieval.corpus import StoredCorpus, write_corpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.faiss_index import FaissIndex
from qrag_jax.retrieval.index_folder import IndexAt
from qrag_jax.retrieval.milvus import MilvusBM25Index, MilvusIndex
from qrag_jax.retrieval.protocol import NONE, FusedIndex, Hits, Queries, VectorIndex, Where
from qrag_jax.retrieval.qdrant import QdrantIndex
from qrag_jax.retrieval.server_index import ServerIndex, ServerSettings
from qrag_jax.retrieval.vectors import ScanIndex
from tests.retrieval.milvus_process import MilvusProcess
from tests.retrieval.qdrant_stand_in import running
from tests.retrieval.small_corpus import (
    WIDTH,
    Task,
    assert_same,
    best_of,
    by_vectors,
    corpus_of,
    save_vectors,
    searched,
    slow_bm25,
    stored,
    task_of,
)

# The client of Qdrant warns of batches that it sends again, and of servers of other versions.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
URLS: dict[str, Callable[[], str]] = {}  # of the servers, which start when they are asked for

# ---------------------------------------------------------------------- the definitions, slowly

Slow = Callable[[Task, Where | None], np.ndarray]  # → scores `[queries, passages]`; -inf: no hit


def by_words(task: Task, where: Where | None, every: bool = False) -> np.ndarray:
    """every: passages have all words of the query."""
    words, rows = Words(BM25Config()), []
    texts = [words(passage.text) for passage in task.corpus]
    for query in task.queries.texts:
        asked = words(query)
        scores = slow_bm25(texts, asked, BM25Config()).round(6)
        able = [{*asked} <= {*text} if every else score > 0 for text, score in zip(texts, scores)]
        rows.append(np.where(np.array(able) & bool(asked), scores, -np.inf))
    return np.where(task.corpus.matching(where or {}), rows, -np.inf)


def by_both(task: Task, where: Where | None) -> np.ndarray:
    """Reciprocal ranks of what agrees with the filter."""
    found = np.zeros((len(task.queries), len(task.corpus)))
    for slow in (by_words, by_vectors):
        ranks = best_of(slow(task, where), len(task.corpus)).numbers
        for row, numbers in zip(found, ranks):
            there = numbers[numbers != NONE]
            row[there] += 1 / (60 + 1 + np.arange(len(there)))
    return np.where(found > 0, found.round(12), -np.inf)


# ---------------------------------------------------------------------- the engines


def server(kind: type[ServerIndex], corpus: StoredCorpus, sent: Any) -> Any:
    """In a collection of its own."""
    at = {"url": URLS[kind.TITLE](), "collection": f"c{uuid.uuid4().hex}"}
    return kind.build(corpus, sent, ServerSettings(**at, batch=300, exact=kind is MilvusIndex))


qdrant, milvus = partial(server, QdrantIndex), partial(server, MilvusIndex)


class Engine(NamedTuple):
    """What it finds; how its folders are written; how an index of vectors is made in memory."""

    slow: Slow
    write: Callable[[Path, StoredCorpus, np.ndarray], Any]
    make: Callable[[StoredCorpus, np.ndarray], VectorIndex] = ExactIndex


def exact_files(folder: Path, corpus: StoredCorpus, vectors: np.ndarray) -> None:
    save_vectors(folder / "exact", corpus, vectors)


def both_files(folder: Path, corpus: StoredCorpus, vectors: np.ndarray) -> None:
    exact_files(folder, corpus, vectors)
    BM25Index.build(corpus).save(folder / "bm25")


OF_VECTORS = {
    "exact": Engine(by_vectors, exact_files),
    "scan": Engine(by_vectors, exact_files, ScanIndex),
    "faiss": Engine(
        by_vectors, lambda f, c, v: FaissIndex.build(c, v).save(f / "faiss"), FaissIndex.build
    ),
    "qdrant": Engine(by_vectors, lambda f, c, v: qdrant(c, v).save(f / "qdrant"), qdrant),
    "milvus": Engine(by_vectors, lambda f, c, v: milvus(c, v).save(f / "milvus"), milvus),
}
ENGINES = OF_VECTORS | {
    "bm25": Engine(by_words, lambda f, c, v: BM25Index.build(c).save(f / "bm25")),
    "boolean": Engine(
        partial(by_words, every=True), lambda f, c, v: BM25Index.build(c).save(f / "bm25")
    ),
    "milvus_bm25": Engine(
        by_words, lambda f, c, v: server(MilvusBM25Index, c, BM25Config()).save(f / "milvus_bm25")
    ),
    "hybrid": Engine(by_both, both_files),
}


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Those of Milvus run on a real process, at night."""
    lacks_it = importlib.util.find_spec("milvus_lite") is None
    at_night = [
        pytest.mark.nightly,
        pytest.mark.skipif(lacks_it, reason="make milvus installs Milvus Lite"),
    ]
    real = [pytest.param(n, marks=at_night if "milvus" in n else []) for n in names]
    return pytest.mark.parametrize("name", real)


every_engine, of_vectors = each(ENGINES), each(OF_VECTORS)


class Shelf:
    """A folder for each engine that is asked for; `task` is what is in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.task = root, task_of(root / "task", 83)
        self.index = functools.cache(self._index)

    def _index(self, name: str) -> Any:
        shutil.copytree(self.root / "task", self.root / name / "corpus")
        corpus = StoredCorpus(self.root / name / "corpus")
        ENGINES[name].write(self.root / name, corpus, self.task.vectors)
        return opened(self.root / name, name)


def opened(folder: Path, name: str) -> Any:
    return IndexAt(folder, name).open()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    root = tmp_path_factory.mktemp("shelf")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def milvus_url() -> str:
            process = MilvusProcess(root / "milvus-data")
            stack.callback(process.kill)
            return process.url

        stand_in = stack.enter_context(running())
        URLS.update(Qdrant=lambda: stand_in.url, Milvus=milvus_url)
        yield Shelf(root)


@pytest.fixture
def copied(shelf: Shelf, name: str, tmp_path: Path) -> Path:
    """The engine's folder, for faults."""
    shelf.index(name)
    return shutil.copytree(shelf.root / name, tmp_path / name)


def test_every_engine_is_registered() -> None:
    assert ENGINES.keys() == {*index_folder.ENGINES}


# ---------------------------------------------------------------------- what is found


@every_engine
def test_hits_are_those_of_the_definition(name: str, shelf: Shelf) -> None:
    """In order, ties by number; with few, many and more than all; filtered; empty and foreign
    queries."""
    task, index = shelf.task, shelf.index(name)
    wheres = (None, {}, {"kind": 3}, {"kind": [1, 4]}, {"kind": 2, "rare": True}, {"kind": 77})
    for where in (*wheres, None):  # at the end the filter is gone
        scores = ENGINES[name].slow(task, where)
        for k in (1, 10, 200):
            hits, wanted = index.search(task.queries, k, where), best_of(scores, k)
            assert (hits.numbers.dtype, hits.scores.dtype) == (np.int64, np.float32)
            np.testing.assert_array_equal(hits.numbers, wanted.numbers)
            np.testing.assert_allclose(hits.scores, wanted.scores, rtol=1e-5, atol=1e-6)


@every_engine
def test_a_batch_is_its_queries_one_by_one(name: str, shelf: Shelf) -> None:
    """Also when threads search at once."""
    task, index = shelf.task, shelf.index(name)
    together = index.search(task.queries, 10)
    for number, text in enumerate(task.queries.texts):
        one = slice(number, number + 1)
        alone = index.search(Queries([text], task.queries.vectors[one]), 10)
        assert_same(alone, Hits(together.numbers[one], together.scores[one]))
    none = index.search(Queries([], np.zeros((0, WIDTH), np.float32)), 10)
    assert none.numbers.shape == none.scores.shape == (0, 10)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: index.search(task.queries, 10), range(8)):
            assert_same(found, together)
    with pytest.raises(InputError, match="'colour'"):
        index.search(task.queries, 3, {"colour": "red"})


@pytest.mark.parametrize("name", ["exact", "scan", "faiss", "qdrant"])
def test_words_add_their_weight_to_vectors(name: str, shelf: Shelf) -> None:
    """By the definition: a passage that the words do not find gets nothing, the best one all."""
    task = shelf.task
    index = FusedIndex(shelf.index(name), shelf.index("bm25"), 0.3)
    for where in (None, {"kind": [1, 4]}, {"kind": 77}):
        words = by_words(task, where)
        most = np.maximum(words.max(axis=1, keepdims=True), 1e-9)
        wanted = best_of(by_vectors(task, where) + 0.3 * np.maximum(words / most, 0), 10)
        hits = index.search(task.queries, 10, where)
        np.testing.assert_array_equal(hits.numbers, wanted.numbers)
        np.testing.assert_allclose(hits.scores, wanted.scores, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- folders


@every_engine
def test_an_index_that_is_open_stays_what_it_was(name: str, copied: Path, shelf: Shelf) -> None:
    """While its folder is built again, over the same passages in another order."""
    task, old = shelf.task, opened(copied, name)
    shutil.rmtree(copied)
    passages = list(task.corpus)[::-1]
    turned = task._replace(
        corpus=write_corpus(copied / "corpus", passages), vectors=task.vectors[::-1].copy()
    )
    ENGINES[name].write(copied, turned.corpus, turned.vectors)
    for where in (None, {"kind": [0, 1]}):
        wanted = shelf.index(name).search(task.queries, 10, where)
        assert_same(old.search(task.queries, 10, where), wanted)
    assert old.corpus.passages([3, 80]) == [passages[79], passages[2]]
    new = opened(copied, name).search(task.queries, 1)
    wanted = best_of(ENGINES[name].slow(turned, None), 1)
    np.testing.assert_array_equal(new.numbers, wanted.numbers)


def manifests(folder: Path) -> list[Path]:
    return sorted(folder.rglob("manifest.json"))


@every_engine
def test_another_corpus_and_foreign_folders_are_refused(name: str, copied: Path) -> None:
    for change, field in (({"engine": "foreign"}, "engine"), ({"format": 99}, "format")):
        for path in manifests(copied):
            whole = path.read_text()
            path.write_text(json.dumps(json.loads(whole) | change))
            with pytest.raises(InputError, match=rf"manifest\.json.*{field}"):
                opened(copied, name)
            path.write_text(whole)
    shutil.rmtree(copied / "corpus")
    corpus_of(copied / "corpus", 83, other=1)
    with pytest.raises(InputError, match="field corpus"):
        opened(copied, name)
    shutil.rmtree(copied / "corpus")
    with pytest.raises(InputError, match=r"corpus\.json|corpus"):
        opened(copied, name)
    with pytest.raises(InputError, match="nowhere"):
        IndexAt(copied / "nowhere", name).settled([name], "build one")


class Runs:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@every_engine
def test_damaged_files_are_refused_by_name(name: str, copied: Path, tmp_path: Path) -> None:
    """Cut, missing, no JSON; and a pickle in place of an array is not loaded."""

    def refused(path: Path, data: bytes | None, word: str) -> None:
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(InputError, match=word):
            opened(copied, name)

    for manifest in manifests(copied):
        whole = manifest.read_bytes()
        for text in (b"", b"[", b"{}"):
            refused(manifest, text, r"manifest\.json")
        manifest.write_bytes(whole)
        for file in json.loads(whole)["files"]:
            path = manifest.parent / file
            sound = path.read_bytes()
            refused(path, sound[:-1], file)
            path.write_bytes(sound)
            refused(path, None, file)
            if file.endswith((".npy", ".json")):
                evil = pickle.dumps(Runs(tmp_path / "ran"))
                said = json.loads(whole)
                said["files"][file] = len(evil)
                manifest.write_text(json.dumps(said))
                path.write_bytes(evil)
                with pytest.raises(ValueError, match=r"."):
                    opened(copied, name)
                manifest.write_bytes(whole)
                assert not (tmp_path / "ran").exists()
            path.write_bytes(sound)
    opened(copied, name)


# ---------------------------------------------------------------------- engines of vectors


@of_vectors
def test_other_shapes_and_equal_vectors(name: str, shelf: Shelf, tmp_path: Path) -> None:
    """One passage, one number, all scores equal; and numbers that round."""
    tasks = [task_of(tmp_path / f"{n}", n, width) for n, width in ((1, 1), (2, 5), (15, 1))]
    tasks.append(shelf.task._replace(vectors=np.full_like(shelf.task.vectors, -3.0)))
    for task in tasks:
        index = ENGINES[name].make(task.corpus, task.vectors)
        for where in (None, {"kind": 0}):
            assert_same(index.search(task.queries, 20, where), searched(task, 20, where))
    vectors, asked = np.random.default_rng(5).standard_normal((2, 83, WIDTH)).astype(np.float32)
    task = Task(shelf.task.corpus, vectors, Queries([""] * 9, asked[:9]))
    found = ENGINES[name].make(task.corpus, vectors).search(task.queries, 10)
    near = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(found.scores, searched(task, 10).scores, **near)
    of_found = np.take_along_axis(by_vectors(task, None), found.numbers, axis=1)
    np.testing.assert_allclose(of_found, found.scores, **near)


@of_vectors
def test_vectors_come_back_and_bad_ones_are_refused(name: str, shelf: Shelf) -> None:
    task, index = shelf.task, shelf.index(name)
    found = index.vectors([82, 0, 5, 5])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, task.vectors[[82, 0, 5, 5]])
    for vectors, word in (
        (None, "vectors"),
        (np.zeros((1, WIDTH + 1), np.float32), f"{WIDTH}"),
        (np.zeros((2, WIDTH), np.float32), "vectors"),
        (np.full((1, WIDTH), np.nan, np.float32), "vector 0"),
    ):
        with pytest.raises(ValueError, match=word):
            index.search(Queries(["red"], vectors), 3)


@of_vectors
def test_filters_mean_what_they_mean_for_the_corpus(
    name: str, shelf: Shelf, tmp_path: Path
) -> None:
    values: list[Any] = [
        *(0, 1, 1.0, 1.5, True, None, "", "1", "true", "a.b", "Ä\ud800", "x" * 500),
        *([], [1, "a.b"], [[1]], {"a": 1}, {"b": [1, 2]}, 10**30),
    ]
    texts = [f"passage {number}" for number in range(len(values))]
    fields = {name: values for name in ("plain", "dots.in[] it", 'a "quoted" one', "")}
    corpus = stored(tmp_path, texts, **fields)
    queries = Queries(["any"], np.ones((1, 2), np.float32))
    index = ENGINES[name].make(corpus, np.ones((len(values), 2), np.float32))
    several = [[], [1, "a.b"], [None, True], (1.5, 7), {"", "1"}]
    for wanted in [*values, *several, "absent"]:
        for field in fields:
            numbers = index.search(queries, len(values), {field: wanted}).numbers[0]
            matching = np.flatnonzero(corpus.matching({field: wanted})).tolist()
            assert numbers[numbers >= 0].tolist() == matching, (field, wanted)
    numbers = index.search(queries, 2, {"plain": "1", "": "1"}).numbers[0]
    assert numbers.tolist() == [7, -1]
    with pytest.raises(InputError, match="'plai'"):
        index.search(queries, 2, {"plai": 1})

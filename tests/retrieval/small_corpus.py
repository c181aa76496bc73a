"""Small corpora, in folders and in memory, folders of vectors, and slow searches of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config
from qrag_jax.retrieval.corpus import StoredCorpus, write_corpus
from qrag_jax.retrieval.index_folder import NAME, Manifest, VectorParts, read_manifest
from qrag_jax.retrieval.protocol import NONE, Hits, Passage, Queries, Where
from qrag_jax.retrieval.vectors import ScanIndex
from qrag_jax.runtime.retriever_config import Positions

WIDTH = 13
WORDS = ("red", "green", "blue", "round", "square", "heavy", "light", "old", "new", "fast")
FOREIGN = {5: "日本 東京 red", 6: "été\u2028 naïve Ünïcode", 7: "😀 red"}  # texts of these numbers


def stored(folder: Path, texts: Sequence[str], **metadata: Sequence[Any]) -> StoredCorpus:
    """Passages p0, p1 and so on, with the values of every field of the metadata."""
    return write_corpus(
        folder,
        (
            Passage(f"p{i}", text, "", {name: values[i] for name, values in metadata.items()})
            for i, text in enumerate(texts)
        ),
    )


class Task(NamedTuple):
    """A corpus with vectors of whole numbers, many of them equal, and queries of that kind."""

    corpus: StoredCorpus
    vectors: np.ndarray
    queries: Queries


def corpus_of(folder: Path, passages: int, other: int = 0) -> StoredCorpus:
    """A corpus of so many passages; `kind` is the number modulo 5, `rare` is in number 2 alone."""
    rng = np.random.default_rng(passages + other)
    texts = [" ".join(rng.choice(WORDS, 4)) for _ in range(passages)]
    texts = [FOREIGN.get(number, text) for number, text in enumerate(texts)]
    return write_corpus(
        folder,
        (
            Passage(f"id {n}", text, "", {"kind": n % 5} | ({"rare": True} if n == 2 else {}))
            for n, text in enumerate(texts)
        ),
    )


def task_of(folder: Path, passages: int, width: int = WIDTH, queries: int = 9) -> Task:
    """A task drawn at random; vectors 0 and 1 are zero, and every third is one of four."""
    rng = np.random.default_rng(passages * 1000 + width)
    vectors = rng.integers(-8, 9, (passages, width)).astype(np.float32)
    vectors[::3] = vectors[:4][np.arange(len(vectors[::3])) % min(4, passages)]
    vectors[:2] = 0
    asked = rng.integers(-8, 9, (queries, width)).astype(np.float32)
    asked[-1] = 0
    texts = [" ".join(rng.choice(WORDS, 2)) for _ in range(queries)]
    texts[-3:] = ["", "東京 red", "été"]
    return Task(corpus_of(folder, passages), vectors, Queries(texts, asked))


def best_of(scores: np.ndarray, k: int) -> Hits:
    """The k best of scores `[queries, passages]`, of equals the lowest numbers; -inf: no hit."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    top = np.take_along_axis(scores, order, axis=1)
    short = ((0, 0), (0, k - order.shape[1]))
    return Hits(
        np.pad(np.where(top == -np.inf, NONE, order), short, constant_values=NONE),
        np.pad(top, short, constant_values=-np.inf).astype(np.float32),
    )


def by_vectors(task: Task, where: Where | None) -> np.ndarray:
    """Scores `[queries, passages]` by NumPy in float64; -inf: no hit."""
    assert task.queries.vectors is not None
    scores = task.queries.vectors.astype(np.float64) @ task.vectors.astype(np.float64).T
    return np.where(task.corpus.matching(where or {}), scores, -np.inf)


def searched(task: Task, k: int, where: Where | None = None) -> Hits:
    return best_of(by_vectors(task, where), k)


def assert_same(found: Hits, wanted: Hits) -> None:
    """To the bit."""
    np.testing.assert_array_equal(found.numbers, wanted.numbers)
    np.testing.assert_array_equal(found.scores, wanted.scores)


def slow_bm25(
    passages: Sequence[Sequence[str]], query: Sequence[str], config: BM25Config
) -> np.ndarray:
    """float64 `[passages]`: the formulas, word by word and passage by passage."""
    count, mean = len(passages), sum(map(len, passages)) / len(passages)
    scores = np.zeros(count)
    for word in query:
        df = sum(word in passage for passage in passages)
        for number, passage in enumerate(passages):
            tf = Counter(passage)[word]
            if not tf:
                continue
            pivot = config.k1 * (1 - config.b + config.b * len(passage) / mean)
            scores[number] += math.log(1 + (count - df + 0.5) / (df + 0.5)) * tf / (tf + pivot)
    return scores


def save_vectors(
    folder: Path, corpus: StoredCorpus, vectors: np.ndarray, encoder: str = "", **settings: Any
) -> Manifest:
    """Writes vectors as `qrag index` does, in two parts."""
    (folder / NAME).unlink(missing_ok=True)
    count, width = vectors.shape
    sizes = count, encoder, width, str(vectors.dtype)
    about = Manifest("exact", corpus.digest, *sizes, settings=settings)
    parts = VectorParts(folder, about, -(-count // 2))
    parts.begin()
    for number in parts.numbers:
        rows = parts.passages(number)
        parts.write(number, vectors[rows.start : rows.stop], 0)
    parts.finish()
    return read_manifest(folder)


class ListedCorpus:
    """Passages in memory."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = list(passages)
        self.digest = "listed"

    def __len__(self) -> int:
        return len(self._passages)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self._passages)

    def passages(self, numbers: Sequence[int] | np.ndarray) -> list[Passage]:
        return [self._passages[int(number)] for number in numbers]

    def matching(self, where: Where) -> np.ndarray:
        for field in where:
            if not any(field in passage.metadata for passage in self._passages):
                raise InputError(f"no passage has the field {field}.")
        return np.array([where.items() <= {*each.metadata.items()} for each in self._passages])


def of_texts(texts: Sequence[str], vectors: np.ndarray) -> ScanIndex:
    """An index whose passages have the metadata `even`: whether their number is."""
    passages = [
        Passage(f"p{number}", text, metadata={"even": number % 2 == 0})
        for number, text in enumerate(texts)
    ]
    return ScanIndex(ListedCorpus(passages), vectors)


def positions(kind: str) -> Positions | None:
    """Positions as trained retrievers have them; None: "none"."""
    sizes = {"theta": 10_000.0, "step": 20, "span": 18, "parts": 5, "most_chunks": 2000}
    return None if kind == "none" else Positions(kind=kind, **sizes)  # type: ignore[arg-type]

"""Readers of corpora and indexes: manifests, vectors, words, columns, and what is unfinished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tried_inputs import FileReader
from qrag_jax.retrieval import opening
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.boolean_search import BooleanIndex
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import CorpusWriter, write_corpus
from qrag_jax.retrieval.faiss_index import FaissIndex
from qrag_jax.retrieval.manifest import Manifest
from qrag_jax.retrieval.opening import IndexAt
from qrag_jax.retrieval.protocol import Passage, Queries
from qrag_jax.retrieval.vector_files import PartNote, VectorParts
from qrag_jax.systems import chunk_notes
from tests.retrieval.saved_vectors import save_vectors

_TEXTS = (
    "Oslo is the capital of Norway.",
    "Norway is a country in Europe.",
    "Ada Berg was born in Oslo.",
    "The fjord of Oslo is long.",
)
_PASSAGES = [Passage(f"p{n}", text, "", {"page": n % 2}) for n, text in enumerate(_TEXTS)]
_WIDTH = 4


def _vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(len(_TEXTS), _WIDTH)).astype(np.float32)


def _queries() -> Queries:
    return Queries(["oslo norway", "ada"], _vectors()[:2])


def _files(folder: Path) -> list[Path]:
    """The files that an engine has written; locks are empty."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if path.stat().st_size]


def _corpus(folder: Path) -> StoredCorpus:
    return write_corpus(folder / opening.CORPUS, _PASSAGES)


def _stored(folder: Path) -> Sequence[Path]:
    _corpus(folder).matching({"page": 1})
    return _files(folder)


def _read_stored(folder: Path) -> None:
    corpus = StoredCorpus(folder / opening.CORPUS)
    corpus.passages(range(len(corpus)))
    corpus.numbers([f"p{n}" for n in range(5)])
    list(corpus)
    corpus.matching({"page": 1})
    corpus.check_content()


def _unfinished(folder: Path) -> Sequence[Path]:
    with CorpusWriter(folder / "c") as writer:
        for passage in _PASSAGES[:2]:
            writer.add(passage)
    return _files(folder)


def _finish(folder: Path) -> None:
    with CorpusWriter(folder / "c") as writer:
        for passage in _PASSAGES[len(writer) :]:
            writer.add(passage)
        writer.finish()


def _engine(make: Callable[[StoredCorpus], Any], engine: str) -> Callable[[Path], Sequence[Path]]:
    """Writes a corpus and an engine's index of it; the engine's files are damaged."""

    def write(folder: Path) -> Sequence[Path]:
        make(_corpus(folder)).save(folder / engine)
        return _files(folder / engine)

    return write


def _search(engine: str) -> Callable[[Path], None]:
    def search(folder: Path) -> None:
        index = IndexAt(folder, engine).settled((engine,), "give another").open()
        index.search(_queries(), 3)
        index.search(_queries(), 3, {"page": 1})

    return search


def _exact(folder: Path) -> Sequence[Path]:
    save_vectors(folder / opening.EXACT, _corpus(folder), _vectors(), "abc")
    return _files(folder / opening.EXACT)


def _parts(folder: Path) -> VectorParts:
    made_of = {"encoder": "abc", "corpus": "def"}
    return VectorParts(folder / "parts", made_of, len(_TEXTS), 2, _WIDTH, "float32")


def _write_parts(folder: Path) -> Sequence[Path]:
    parts = _parts(folder)
    parts.begin()
    for number in parts.numbers:
        rows = parts.passages(number)
        parts.write(number, _vectors()[rows.start : rows.stop], PartNote(len(rows), 10, 0))
    return _files(folder)


def _finish_parts(folder: Path) -> None:
    parts = _parts(folder)
    parts.begin()
    found = parts.finished()
    sum(note.tokens + note.cut for note in found.values())
    if len(found) == len(parts.numbers):
        parts.finish(Manifest(opening.EXACT, "def", 4, "abc", _WIDTH, "float32"))


def _note(folder: Path) -> Sequence[Path]:
    chunk_notes.write_note(folder, "abc", "def")
    return _files(folder)


def readers() -> list[FileReader]:
    """The readers of this module."""
    return [
        FileReader("a stored corpus", _stored, _read_stored),
        FileReader("a corpus that is not finished", _unfinished, _finish),
        FileReader(
            "exact vectors",
            _exact,
            _search(opening.EXACT),
        ),
        FileReader(
            "vectors that are scanned",
            _exact,
            _search(opening.SCAN),
        ),
        FileReader(
            "an index of words",
            _engine(BM25Index.build, opening.BM25),
            _search(opening.BM25),
        ),
        FileReader(
            "an index of word places",
            _engine(BooleanIndex.build, opening.BOOLEAN),
            _search(opening.BOOLEAN),
        ),
        FileReader(
            "an index of faiss",
            _engine(lambda corpus: FaissIndex(corpus, _vectors(), "abc"), opening.FAISS),
            _search(opening.FAISS),
        ),
        FileReader("parts of vectors", _write_parts, _finish_parts),
        FileReader(
            "a note on an exported tower", _note, lambda folder: chunk_notes.noted(folder, "abc")
        ),
    ]

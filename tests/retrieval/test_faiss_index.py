"""The engine on faiss does what every engine does, and refuses what is no file of it."""

from __future__ import annotations

import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.faiss_index import FILE, FaissIndex, read_index
from tests.retrieval.conformance import OF_VECTORS, Engine, run_with, task_of

ROWS = np.random.default_rng(0).standard_normal((11, 5)).astype(np.float32)

test_faiss = run_with(Engine(FaissIndex, FaissIndex.open), OF_VECTORS)


def test_an_index_is_of_its_vectors(tmp_path: Path) -> None:
    task = task_of(tmp_path, 20)
    FaissIndex(task.corpus, task.vectors, "e0").save(tmp_path)
    assert FaissIndex.open(tmp_path, task.corpus, "e0").encoder == "e0"
    with pytest.raises(InputError, match="field encoder"):
        FaissIndex.open(tmp_path, task.corpus, "e1")
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=FILE):
        FaissIndex.open(tmp_path, task.corpus)


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    hnsw, distance, broken = faiss.IndexHNSWFlat(5, 4), faiss.IndexFlatL2(5), faiss.IndexFlatIP(5)
    hnsw.add(ROWS)
    distance.add(ROWS)
    broken.add(np.full((2, 5), np.nan, np.float32))
    for index, word in ((hnsw, "a "), (distance, "IndexFlatL2"), (broken, "vector 0")):
        faiss.write_index(index, str(path))
        with pytest.raises(InputError, match=word):
            read_index(path)


def test_what_is_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with pytest.raises(InputError, match="a cannot be read"):
        read_index(path)
    index = faiss.IndexFlatIP(5)
    index.add(ROWS)
    faiss.write_index(index, str(path))
    np.testing.assert_array_equal(read_index(path).reconstruct_n(0, 11), ROWS)
    whole = path.read_bytes()
    for data in (whole[:-7], whole[:20], b"", b"no index at all, but some text"):
        path.write_bytes(data)
        with pytest.raises(InputError, match="index of faiss"):
            read_index(path)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"qrag_jax\[faiss\]"):
        read_index(path)

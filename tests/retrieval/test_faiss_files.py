"""faiss itself reads what we write, and we read what it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.faiss_files import read_flat, write_flat

ROWS = np.random.default_rng(0).standard_normal((11, 5)).astype(np.float32)
IDS = np.array([5, 3, 900, 1, 0, 8, 9, 10, 11, 2, 2**40])


def test_faiss_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a"
    write_flat(path, ROWS)
    index = faiss.read_index(str(path))
    assert type(index) is faiss.IndexFlatIP
    np.testing.assert_array_equal(index.reconstruct_n(0, 11), ROWS)
    write_flat(path, ROWS, IDS)
    index = faiss.read_index(str(path))
    assert type(index) is faiss.IndexIDMap
    assert index.search(ROWS[:1], 11)[1][0].tolist() == IDS[np.argsort(-(ROWS @ ROWS[0]))].tolist()
    assert [p.name for p in path.parent.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", [None, faiss.IndexIDMap, faiss.IndexIDMap2])
def test_we_read_its_files(kind: type | None, tmp_path: Path) -> None:
    index = faiss.IndexFlatIP(5)
    if kind is None:
        index.add(ROWS)
    else:
        index = kind(index)
        index.add_with_ids(ROWS, IDS)
    faiss.write_index(index, str(tmp_path / "a"))
    del index
    found = read_flat(tmp_path / "a")
    np.testing.assert_array_equal(found.vectors, ROWS)
    assert (found.ids is None) == (kind is None)
    assert found.ids is None or found.ids.tolist() == IDS.tolist()


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    hnsw, distance, broken = faiss.IndexHNSWFlat(5, 4), faiss.IndexFlatL2(5), faiss.IndexFlatIP(5)
    hnsw.add(ROWS)
    distance.add(ROWS)
    broken.add(np.full((2, 5), np.nan, np.float32))
    for index, message in (
        (hnsw, "a holds an index of the kind IndexHNSWFlat; .* write an IndexFlatIP"),
        (distance, r"a ranks by L2 distance \(field metric_type\), but .* length 1, both rank"),
        (broken, "a: the vector 0, counted from 0, holds NaN"),
    ):
        faiss.write_index(index, str(path))
        with pytest.raises(InputError, match=message):
            read_flat(path)


def test_what_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a does not exist; give an index file of faiss"):
        read_flat(tmp_path / "a")
    write_flat(tmp_path / "a", ROWS)
    whole = (tmp_path / "a").read_bytes()
    for data in (whole[:-7], whole[:20], b"", b"no index at all, but some text"):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(InputError, match="a is no index of faiss, or cut short"):
            read_flat(tmp_path / "a")


def test_ids_must_be_as_many(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a: 3 ids for 11 vectors"):
        write_flat(tmp_path / "a", ROWS, IDS[:3])
    assert not (tmp_path / "a").exists()


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"pip install 'qrag_jax\[faiss\]', or use"):
        read_flat(tmp_path / "a")

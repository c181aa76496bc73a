"""The engine on faiss does what every engine does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.faiss_files import write_flat
from qrag_jax.retrieval.faiss_index import FILE, FaissIndex
from tests.retrieval.conformance import (
    OF_VECTORS,
    Engine,
    assert_same,
    run_with,
    searched,
    task_of,
)

test_faiss = run_with(Engine(FaissIndex, FaissIndex.open), OF_VECTORS)


def test_files_of_other_programs(tmp_path: Path) -> None:
    task = task_of(tmp_path, 83)
    wanted = searched(task, 20)
    write_flat(tmp_path / "a", task.vectors)
    assert_same(FaissIndex.read(tmp_path / "a", task.corpus).search(task.queries, 20), wanted)
    order = np.random.default_rng(0).permutation(83)
    write_flat(tmp_path / "b", task.vectors[order], order)
    index = FaissIndex.read(tmp_path / "b", task.corpus)
    assert_same(index.search(task.queries, 20), wanted)
    np.testing.assert_array_equal(index.vectors([7, 3]), task.vectors[[7, 3]])
    write_flat(tmp_path / "c", task.vectors, order + 1)
    with pytest.raises(InputError, match="c has ids that are not the numbers 0 to 82 of the corp"):
        FaissIndex.read(tmp_path / "c", task.corpus)


def test_an_index_is_of_its_vectors(tmp_path: Path) -> None:
    task = task_of(tmp_path, 20)
    FaissIndex(task.corpus, task.vectors, "e0", 3).save(tmp_path)
    again = FaissIndex.open(tmp_path, task.corpus, "e0", 3)
    assert (again.encoder, again.version) == ("e0", 3)
    with pytest.raises(InputError, match="has 3 in the field version, but 4 is asked for"):
        FaissIndex.open(tmp_path, task.corpus, version=4)
    with pytest.raises(InputError, match="has 'e0' in the field encoder"):
        FaissIndex.open(tmp_path, task.corpus, "e1")
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"index\.faiss is cut short"):
        FaissIndex.open(tmp_path, task.corpus)

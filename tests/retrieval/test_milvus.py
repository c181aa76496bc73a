"""The engines on Milvus, on a real process that is killed: `make nightly`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import server_index
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.milvus import MilvusBM25Index, MilvusIndex
from qrag_jax.retrieval.server_index import ServerSettings
from tests.retrieval.milvus_process import MilvusProcess
from tests.retrieval.small_corpus import searched, task_of

pytestmark = pytest.mark.nightly


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MilvusProcess]:
    monkeypatch.setattr(server_index, "PAUSE", 0.0)
    process = MilvusProcess(tmp_path / "milvus")
    yield process
    process.kill()


@pytest.mark.parametrize("kind", [MilvusIndex, MilvusBM25Index])
def test_a_server_that_dies(kind: Any, server: MilvusProcess, tmp_path: Path) -> None:
    """In the middle of a build, which then goes on; between searches; and one that is not there."""
    task, begun = task_of(tmp_path, 83), list[int]()
    settings = ServerSettings(server.url, batch=10, exact=True)
    sent = task.vectors if kind is MilvusIndex else BM25Config()

    def report(passages: int) -> None:
        begun.append(passages)
        if len(begun) == 5:
            server.kill()

    with pytest.raises(InputError, match="upsert") as error:
        kind.build(task.corpus, sent, settings, report=report)
    assert "\n" not in str(error.value)
    server.start()
    index = kind.build(task.corpus, sent, settings, report=begun.append)
    assert begun == [0, 10, 20, 30, 40, 40, 50, 60, 70, 80, 83]  # what came is not sent again
    index.save(tmp_path)
    server.kill()
    with pytest.raises(InputError, match="passages"):
        index.search(task.queries, 5)
    with pytest.raises(InputError, match=server.url):
        kind.open(tmp_path, task.corpus)
    server.start()
    found, wanted = kind.open(tmp_path, task.corpus).search(task.queries, 5), searched(task, 5)
    if kind is MilvusBM25Index:
        wanted = BM25Index.build(task.corpus).search(task.queries, 5)
    np.testing.assert_array_equal(found.numbers, wanted.numbers)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-6)


def test_collections_and_settings_that_do_not_fit(
    server: MilvusProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILVUS_TOKEN", "user:secret-0123")
    task, at = task_of(tmp_path, 83), ServerSettings(server.url)
    graph = MilvusIndex.build(task.corpus, task.vectors, at, "e0")
    narrow = task.vectors[:, :2] + 1
    others: Any = ((MilvusIndex, task.vectors, "e1"), (MilvusIndex, narrow, "e0"))
    for kind, sent, encoder in (*others, (MilvusBM25Index, BM25Config(), "")):
        with pytest.raises(InputError, match="--replace"):
            kind.build(task.corpus, sent, at, encoder)
    other = ServerSettings(server.url, collection="theirs")
    MilvusIndex(task.corpus, other, graph._manifest)._ask("create_collection", dimension=3)
    with pytest.raises(InputError, match="theirs") as error:
        MilvusIndex.build(task.corpus, task.vectors, other)
    assert "secret" not in str(error.value)
    found = graph.search(task.queries, 10).numbers
    assert np.mean(found == searched(task, 10).numbers) > 0.9
    again = ServerSettings(server.url, replace=True, index="HNSW_SQ")
    MilvusIndex.build(task.corpus, narrow, again).save(tmp_path)
    assert "secret" not in (tmp_path / "manifest.json").read_text()
    np.testing.assert_array_equal(
        MilvusIndex.open(tmp_path, task.corpus).vectors([3, 3]), narrow[[3, 3]]
    )

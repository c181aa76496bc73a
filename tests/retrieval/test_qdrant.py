"""The engine on Qdrant, through HTTP: what is sent, and what happens when a server fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import models

from qrag_jax.errors import InputError
from qrag_jax.retrieval import server_index
from qrag_jax.retrieval.qdrant import QdrantIndex
from qrag_jax.retrieval.server_index import ServerSettings
from tests.retrieval.qdrant_stand_in import Asked, StandIn, running
from tests.retrieval.small_corpus import WIDTH, Task, searched, task_of
from tests.retrieval.small_corpus import assert_same as same

# The client warns of each batch that it sends again, and of keys without https.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(server_index, "PAUSE", 0.0)
    with running() as state:
        yield state


def built(task: Task, server: StandIn, encoder: str = "", **settings: Any) -> QdrantIndex:
    """In small batches."""
    at = ServerSettings(server.url, **{"batch": 10} | settings)
    return QdrantIndex.build(task.corpus, task.vectors, at, encoder)


def test_the_key_stays_secret(
    tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(tmp_path, 20)
    server.key = "right-0123"
    monkeypatch.setenv("QDRANT_API_KEY", "wrong-4567")
    with pytest.raises(InputError, match=r"401.*QDRANT_API_KEY") as error:
        built(task, server)
    assert "wrong" not in str(error.value)
    assert error.value.__context__ is None  # which would have the key
    monkeypatch.setenv("QDRANT_API_KEY", "right-0123\n")
    built(task, server).save(tmp_path)
    same(QdrantIndex.open(tmp_path, task.corpus).search(task.queries, 5), searched(task, 5))
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"right-0123" in content for content in written)
    # The manifest may be anyone's, and its server would get the key with the first request.
    path, theirs = tmp_path / "manifest.json", "http://theirs.invalid:6333"
    path.write_text(path.read_text().replace(server.url, theirs).replace(": 4,", ": 1,"))
    with pytest.raises(InputError, match=f"{theirs}, and QDRANT_API_KEY"):
        QdrantIndex.open(tmp_path, task.corpus)
    found = QdrantIndex.open(tmp_path, task.corpus, url=server.url)
    same(found.search(task.queries, 5), searched(task, 5))
    monkeypatch.delenv("QDRANT_API_KEY")
    with pytest.raises(InputError, match=r"theirs\.invalid"):
        QdrantIndex.open(tmp_path, task.corpus)


def test_a_server_that_fails(
    tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may pass is tried again; the rest is refused at once."""
    task, requests, let_go = task_of(tmp_path, 83), list[Asked](), threading.Event()

    def fails_with(*statuses: int) -> None:
        """The first requests; 0: none fails any more."""
        requests.clear()

        def status(one: Asked) -> int:
            requests.append(one)
            return statuses[min(requests.count(one), len(statuses)) - 1]

        server.fails = status

    fails_with(400)
    with pytest.raises(InputError, match="400"):
        built(task, server)
    assert len(requests) == 1
    monkeypatch.setattr(server_index, "ATTEMPTS", 2)
    monkeypatch.setattr(server_index, "TIMEOUT", 1)
    server.fails = lambda _: 503 if let_go.wait(20) else 0
    with pytest.raises(InputError, match="timed out"):
        built(task, server)
    monkeypatch.setattr(server_index, "TIMEOUT", 60)
    let_go.set()
    fails_with(500, 502, 0)
    with pytest.raises(InputError, match="502"):
        built(task, server)
    fails_with(500, 502, 0)
    monkeypatch.setattr(server_index, "ATTEMPTS", 3)
    same(built(task, server).search(task.queries, 5), searched(task, 5))


def test_a_collection_of_other_things_stays_as_it_is(tmp_path: Path, server: StandIn) -> None:
    task, client = task_of(tmp_path, 20), server.client
    index = built(task, server, "e0")
    index.save(tmp_path)
    with pytest.raises(InputError, match="field encoder"):
        QdrantIndex.open(tmp_path, task.corpus, encoder="e1")
    narrow = task._replace(vectors=task.vectors[:, :2] + 1)
    dot = models.VectorParams(size=WIDTH, distance=models.Distance.DOT)
    client.create_collection("theirs", dot)
    client.upsert("theirs", [models.PointStruct(id=0, vector=[0.5] * WIDTH)])
    for changed, encoder, settings in (
        (task, "e1", {}),
        (narrow, "e0", {}),
        (task, "e0", {"collection": "theirs"}),
    ):
        with pytest.raises(InputError, match="replace"):
            built(changed, server, encoder, **settings)
    same(index.search(task.queries, 5), searched(task, 5))
    built(narrow, server, replace=True).save(tmp_path)
    opened = QdrantIndex.open(tmp_path, task.corpus)
    np.testing.assert_array_equal(opened.vectors([3]), narrow.vectors[3:4])


@pytest.mark.parametrize(
    ("engine", "client"), [("qdrant", "qdrant_client"), ("milvus", "pymilvus")]
)
def test_a_client_that_is_missing_is_named(
    engine: str, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == client]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, client, None)
    task = task_of(tmp_path, 3)
    with pytest.raises(InputError, match=client):
        server_index.server_engine(engine).build(task.corpus, task.vectors, ServerSettings())


def test_settings_are_refused_without_their_secrets() -> None:
    with pytest.raises(InputError, match="URL") as error:
        ServerSettings("http://db?api-key=secret")
    assert "secret" not in str(error.value)
    assert ServerSettings("http://db:6333/q/").url == "http://db:6333/q"
    read = ServerSettings.parse("shards=16,exact=True,index=DISKANN")
    assert read == ServerSettings(shards=16, exact=True, index="DISKANN")
    for text in ("shard=3", "url=http://a", "shards=1.5", "index=NONE"):
        with pytest.raises(InputError, match=text.partition("=")[0]):
            ServerSettings.parse(text)

"""The engine on Qdrant, through HTTP: what is sent, and what happens when a server fails."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import models

from qrag_jax.errors import InputError
from qrag_jax.retrieval import qdrant
from qrag_jax.retrieval.protocol import Queries
from qrag_jax.retrieval.qdrant import (
    QdrantIndex,
    QdrantLayout,
    QdrantSearch,
    QdrantServer,
    QdrantTarget,
)
from tests.retrieval.qdrant_stand_in import Asked, StandIn, running
from tests.retrieval.small_corpus import WIDTH, Task, searched, stored, task_of
from tests.retrieval.small_corpus import assert_same as same

# The client warns of each batch that it sends again, and of keys without https.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as state:
        yield state


def at(server: StandIn, **settings: Any) -> QdrantServer:
    """Small batches, and no pauses."""
    return QdrantServer(server.url, **{"batch": 10, "pause": 0.0} | settings)


def built(task: Task, server: QdrantServer, encoder: str = "", **target: Any) -> QdrantIndex:
    return QdrantIndex.build(
        task.corpus, task.vectors, QdrantTarget(server, **target), encoder=encoder
    )


def test_what_a_server_is_told(tmp_path: Path, server: StandIn) -> None:
    """No graph while passages are sent; then one. How coarse numbers are searched."""
    task = task_of(tmp_path, 20)
    layout = QdrantLayout(shards=16, replicas=2, m=24, ef_construct=200)
    index = built(task, at(server), layout=layout)
    first, last = server.asked[1].body, server.asked[-1].body
    assert first["vectors"] == {"size": WIDTH, "distance": "Dot", "on_disk": True}
    assert (first["shard_number"], first["replication_factor"]) == (16, 2)
    assert first["quantization_config"]["scalar"]["type"] == "int8"
    assert first["hnsw_config"] == {"m": 0}
    assert last["hnsw_config"] == {"m": 24, "ef_construct": 200}
    assert index.indexed
    index.save(tmp_path)
    coarse = {"ignore": False, "rescore": True, "oversampling": 2.0}
    for chosen, wanted in (
        (None, {"exact": False, "quantization": coarse}),
        (QdrantSearch(exact=True), {"exact": True, "quantization": coarse | {"ignore": True}}),
        (
            QdrantSearch(ef=99, rescore=False),
            {"exact": False, "hnsw_ef": 99, "quantization": {"ignore": False, "rescore": False}},
        ),
    ):
        opened = QdrantIndex.open(tmp_path, task.corpus, search=chosen)
        opened.search(task.queries, 3)
        assert server.asked[-1].body["searches"][0]["params"] == wanted


def test_ties_are_asked_for_to_a_limit(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 200)
    task = task._replace(vectors=np.ones_like(task.vectors))
    for ties, asked in ((10_000, [6, 12, 24, 48, 96, 192, 200]), (20, [6, 12, 20]), (1, [6])):
        index = built(task, at(server, batch=200), search=QdrantSearch(ties=ties))
        server.asked.clear()
        found = index.search(task.queries, 5)
        bodies = [one.body for one in server.asked if one.path == "/points/query/batch"]
        assert [body["searches"][0]["limit"] for body in bodies] == asked
        np.testing.assert_array_equal(found.scores, searched(task, 5).scores)
        if ties > 200:
            same(found, searched(task, 5))


def test_filters_mean_what_they_mean_for_the_corpus(tmp_path: Path, server: StandIn) -> None:
    values: list[Any] = [
        *(0, 1, 1.0, 1.5, True, False, None, "1", "true", "", "a.b", "Ä\ud800", "x" * 500),
        *([], [1, "a.b"], [[1]], {"a": 1}, {"a": 1.0}, {"b": [1, 2]}, ["x" * 500], 10**30),
    ]
    texts = [f"passage {number}" for number in range(len(values))]
    fields = {name: values for name in ("plain", "dots.in[] it", 'a "quoted" one', "")}
    corpus = stored(tmp_path, texts, **fields)
    target = QdrantTarget(at(server))
    index = QdrantIndex.build(corpus, np.ones((len(values), 2), np.float32), target)
    queries = Queries(["any"], np.ones((1, 2), np.float32))
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


def test_the_key_stays_secret(
    tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(tmp_path, 20)
    server.key = "right-0123"
    monkeypatch.setenv("QDRANT_API_KEY", "wrong-4567")
    with pytest.raises(InputError, match=r"HTTP 401.*QDRANT_API_KEY") as error:
        built(task, at(server))
    assert "wrong" not in str(error.value)
    assert error.value.__context__ is None  # which would have the key
    monkeypatch.setenv("QDRANT_API_KEY", "right-0123\n")
    built(task, at(server)).save(tmp_path)
    same(QdrantIndex.open(tmp_path, task.corpus).search(task.queries, 5), searched(task, 5))
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"right-0123" in content for content in written)
    # The manifest may be anyone's, and its server would get the key with the first request.
    path, theirs = tmp_path / "manifest.json", "http://theirs.invalid:6333"
    path.write_text(path.read_text().replace(server.url, theirs).replace(": 6,", ": 1,"))
    with pytest.raises(InputError, match=f"{theirs}, and QDRANT_API_KEY"):
        QdrantIndex.open(tmp_path, task.corpus)
    found = QdrantIndex.open(tmp_path, task.corpus, server=at(server))
    same(found.search(task.queries, 5), searched(task, 5))
    monkeypatch.delenv("QDRANT_API_KEY")
    with pytest.raises(InputError, match=r"theirs\.invalid"):
        QdrantIndex.open(tmp_path, task.corpus)


def test_failures_that_do_not_pass(tmp_path: Path, server: StandIn) -> None:
    task, asked, let_go = task_of(tmp_path, 20), list[Asked](), threading.Event()
    server.fails = lambda one: asked.append(one) or 400  # type: ignore[func-returns-value]
    with pytest.raises(InputError, match="HTTP 400"):
        built(task, at(server))
    assert len(asked) == 1
    server.fails = lambda _: 503 if let_go.wait(20) else 0
    with pytest.raises(InputError, match="Timeout"):
        built(task, at(server, timeout=1, attempts=2))
    let_go.set()
    with running() as gone:
        pass
    for settings in ({}, {"grpc": True, "grpc_port": int(gone.url.rpartition(":")[2])}):
        with pytest.raises(InputError, match=gone.url):
            built(task, at(gone, attempts=2, **settings))


def test_a_collection_whose_maker_got_no_answer(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 20)

    def loses_the_answer(asked: Asked) -> int:
        if asked[:2] == ("PUT", "") and not server.client.collection_exists("passages"):
            server.result("passages", asked)
            return 503
        return 0

    server.fails = loses_the_answer
    same(built(task, at(server)).search(task.queries, 5), searched(task, 5))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_upload_that_was_broken_off_goes_on(
    workers: int, tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qdrant, "_SENT", 20)
    task, counts = task_of(tmp_path, 83), list[int]()
    server.fails = lambda asked: 500 if len(server.sent()) > 50 else 0
    with pytest.raises(InputError, match="HTTP 500" if workers == 1 else "does not answer"):
        built(task, at(server, attempts=1, workers=workers))
    before = server.sent()
    server.fails = lambda _: 0
    # Another size of batches changes nothing of those that were begun.
    again = built(task, at(server, batch=7, workers=workers))
    same(again.search(task.queries, 83), searched(task, 83))
    sent = server.sent()[len(before) :]
    assert {*sent, *before} == {*range(83)}
    assert len(sent) <= 83 - len(before) + 40
    server.asked.clear()
    QdrantIndex.build(task.corpus, task.vectors, QdrantTarget(at(server)), told=counts.append)
    assert (server.sent(), counts) == ([], [83])  # all is there


def test_a_collection_of_other_things_stays_as_it_is(tmp_path: Path, server: StandIn) -> None:
    task, where = task_of(tmp_path, 20), at(server)
    index = built(task, where, "e0")
    index.save(tmp_path)
    with pytest.raises(InputError, match="field encoder"):
        QdrantIndex.open(tmp_path, task.corpus, encoder="e1")
    other = task._replace(vectors=task.vectors + 1)
    narrow = task._replace(vectors=other.vectors[:, :2])
    for word, changed, encoder, layout in (
        ("encoder", task, "e1", QdrantLayout()),
        ("vectors", other, "e0", QdrantLayout()),
        ("layout", task, "e0", QdrantLayout(m=24)),
        (f"{WIDTH}", narrow, "e0", QdrantLayout()),
    ):
        with pytest.raises(InputError, match=word):
            built(changed, where, encoder, layout=layout)
    same(index.search(task.queries, 5), searched(task, 5))
    built(narrow, where, replace=True).save(tmp_path)
    opened = QdrantIndex.open(tmp_path, task.corpus)
    np.testing.assert_array_equal(opened.vectors([3]), narrow.vectors[3:4])


def test_collections_of_other_programs_are_refused(tmp_path: Path, server: StandIn) -> None:
    task, client = task_of(tmp_path, 20), server.client
    cosine, dot = (
        models.VectorParams(size=WIDTH, distance=kind)
        for kind in (models.Distance.COSINE, models.Distance.DOT)
    )
    for name, params in (("cosine", cosine), ("named", {"text": dot}), ("theirs", dot), ("e", dot)):
        client.create_collection(name, params)
    client.upsert("theirs", [models.PointStruct(id=0, vector=[0.5] * WIDTH)])
    for name in ("cosine", "named", "theirs"):
        with pytest.raises(InputError, match=f"collection {name} of"):
            built(task, at(server, collection=name))
    index = built(task, at(server, collection="e"))  # an empty one will do
    same(index.search(task.queries, 5), searched(task, 5))


def test_an_index_without_its_collection(tmp_path: Path, server: StandIn) -> None:
    task, where = task_of(tmp_path, 20), at(server)
    index = built(task, where)
    index.save(tmp_path)
    server.client.delete("passages", [3, 4])
    with pytest.raises(InputError, match="18 of 20"):
        QdrantIndex.open(tmp_path, task.corpus)
    with pytest.raises(InputError, match="passage 4"):
        index.vectors([5, 4])
    built(task, where)
    same(QdrantIndex.open(tmp_path, task.corpus).search(task.queries, 20), searched(task, 20))
    server.client.delete_collection("passages")
    with pytest.raises(InputError, match="does not exist"):
        QdrantIndex.open(tmp_path, task.corpus)


def test_failures_that_pass_are_asked_again(tmp_path: Path, server: StandIn) -> None:
    task, seen = task_of(tmp_path, 83), collections.Counter[str]()

    def twice(asked: Asked) -> int:
        what = f"{asked.method} {asked.path} {str(asked.body)[:60]}"
        seen[what] += 1
        return (500, 502)[seen[what] - 1] if seen[what] < 3 else 0

    server.fails = twice
    same(built(task, at(server, attempts=3)).search(task.queries, 5), searched(task, 5))
    assert min(seen.values()) == 3
    seen.clear()
    with pytest.raises(InputError, match="HTTP 502"):
        built(task, at(server, attempts=2))
    assert list(seen.values()) == [2]


def test_settings_are_refused_without_their_secrets() -> None:
    for url in ("db:6333", "http://me:secret@db", "http://db?api-key=secret"):
        with pytest.raises(InputError, match="URL") as error:
            QdrantServer(url)
        assert "secret" not in str(error.value)
    with pytest.raises(InputError, match="collection"):
        QdrantServer(collection="a/b")
    read = QdrantTarget.parse("shards=16,batch=64,exact=True,pause=1", url="http://db:6333/q/")
    assert read.server == QdrantServer("http://db:6333/q", batch=64, pause=1)
    assert (read.layout, read.search) == (QdrantLayout(shards=16), QdrantSearch(exact=True))
    for text in ("shard=3", "url=http://a", "shards", "shards=1.5", "exact=yes"):
        with pytest.raises(InputError, match=text.partition("=")[0]):
            QdrantTarget.parse(text)

"""The engine on Qdrant, through HTTP: what is sent, and what happens when a server fails."""

from __future__ import annotations

import collections
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.qdrant_index import QdrantIndex
from qrag_jax.retrieval.qdrant_settings import (
    QdrantLayout,
    QdrantSearch,
    QdrantServer,
    QdrantTarget,
)
from qrag_jax.retrieval.qdrant_upload import NAME
from qrag_jax.retrieval.vectors import Vectors
from tests.retrieval.conformance import OF_VECTORS, Check, Engine, Task, searched, task_of
from tests.retrieval.conformance import assert_same as same
from tests.retrieval.qdrant_stand_in import Asked, StandIn, running


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as state:
        yield state


def at(server: StandIn, **settings: Any) -> QdrantServer:
    """Small batches, and no pauses."""
    return QdrantServer(server.url, **{"batch": 10, "workers": 3, "pause": 0.0} | settings)


def built(task: Task, server: QdrantServer, **settings: Any) -> QdrantIndex:
    return QdrantIndex.build(
        task.corpus, task.vectors, task.corpus.folder, server=server, **settings
    )


@pytest.mark.parametrize("check", OF_VECTORS, ids=lambda check: check.__name__)
def test_by_http(check: Check, tmp_path: Path, server: StandIn) -> None:
    def make(corpus: StoredCorpus, vectors: np.ndarray) -> QdrantIndex:
        where = at(server, batch=300)
        return QdrantIndex.build(corpus, vectors, corpus.folder, server=where, replace=True)

    check(Engine(make, QdrantIndex.open), tmp_path)


def test_what_a_server_is_told(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 20)
    layout = QdrantLayout(shards=16, replicas=2, m=24, ef_construct=200)
    index = built(task, at(server), layout=layout)
    assert server.asked[0] == Asked("GET", "/exists", None)
    assert server.asked[1] == Asked(
        "PUT",
        "",
        {
            "vectors": {"size": 13, "distance": "Dot", "on_disk": True},
            "shard_number": 16,
            "replication_factor": 2,
            "on_disk_payload": True,
            "quantization_config": {"scalar": {"type": "int8", "always_ram": True}},
            "hnsw_config": {"m": 0},
            "optimizers_config": {"indexing_threshold": 0},
        },
    )
    index_of_terms = {"field_name": "terms", "field_schema": "keyword"}
    assert server.asked[2] == Asked("PUT", "/index", index_of_terms)
    assert server.asked[-1] == Asked(
        "PATCH",
        "",
        {
            "hnsw_config": {"m": 24, "ef_construct": 200},
            "optimizers_config": {"indexing_threshold": 20000},
        },
    )
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
    with pytest.raises(InputError, match=r"'m': 24.* in the field layout, not .*'m': 16"):
        built(task, at(server))


def test_ties_are_asked_for_to_a_limit(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 200)
    task = task._replace(vectors=np.ones_like(task.vectors))
    for ties, asked in ((10_000, [6, 12, 24, 48, 96, 192, 200]), (20, [6, 12, 20]), (1, [6])):
        index = built(task, at(server, batch=200), search=QdrantSearch(ties=ties))
        server.asked.clear()
        found = index.search(task.queries, 5)
        bodies = [one.body for one in server.asked if one.path == "/points/query/batch"]
        assert [body["searches"][0]["limit"] for body in bodies] == asked
        same(
            found._replace(numbers=found.numbers * 0),
            searched(task, 5)._replace(numbers=found.numbers * 0),
        )
        if ties > 200:
            same(found, searched(task, 5))


def test_no_server(tmp_path: Path) -> None:
    task = task_of(tmp_path, 20)
    with running() as gone:
        pass
    for settings in ({}, {"grpc": True, "grpc_port": int(gone.url.rpartition(":")[2])}):
        began = time.monotonic()
        with pytest.raises(InputError) as error:
            built(task, at(gone, attempts=3, pause=0.1, **settings))
        assert time.monotonic() - began > 0.1 + 0.2
        assert str(error.value).startswith(f"the Qdrant server at {gone.url} does not answer as ")
        assert "refused" in str(error.value)
        assert str(error.value).endswith("; start it, or give the url of one that runs.")
        assert "\n" not in str(error.value)


def test_the_key_stays_secret(
    tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(tmp_path, 20)
    server.key = "right-0123"
    monkeypatch.setenv("QDRANT_API_KEY", "wrong-4567")
    with (
        pytest.raises(InputError) as error,
        pytest.warns(UserWarning, match="insecure connection"),
    ):
        built(task, at(server))
    assert str(error.value) == (
        f"the Qdrant server at {server.url} refuses the API key (HTTP 401: "
        '{"status": {"error": "no such key: ***"}}); export its API key in the environment '
        "variable QDRANT_API_KEY."
    )
    assert error.value.__context__ is None  # which would have the key
    monkeypatch.setenv("QDRANT_API_KEY", "right-0123\n")
    with pytest.warns(UserWarning, match="insecure connection"):
        index = built(task, at(server))
    index.save(tmp_path)
    same(index.search(task.queries, 5), searched(task, 5))
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(b"right-0123" in content for content in written)
    monkeypatch.setenv("QDRANT_API_KEY", "two words")
    with pytest.raises(InputError, match="QDRANT_API_KEY holds characters that no API key has"):
        built(task, at(server))


def test_failures_that_pass(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 83)
    seen: collections.Counter[str] = collections.Counter()

    def twice(asked: Asked) -> int:
        what = f"{asked.method} {asked.path} {str(asked.body)[:60]}"
        seen[what] += 1
        return (500, 429)[seen[what] - 1] if seen[what] < 3 else 0

    server.fails = twice
    same(built(task, at(server, attempts=3)).search(task.queries, 5), searched(task, 5))
    assert min(seen.values()) == 3  # also of what is asked several times
    seen.clear()
    with pytest.raises(InputError, match=r"does not answer as it should \(HTTP 429: .*broken on p"):
        built(task, at(server, attempts=2))
    assert list(seen.values()) == [2]


def test_failures_that_do_not_pass(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 20)
    asked: list[Asked] = []

    def no(one: Asked) -> int:
        asked.append(one)
        return 400

    server.fails = no
    with pytest.raises(
        InputError, match=r"refuses collection_exists for the collection passages \(HTTP 400: .*br"
    ):
        built(task, at(server))
    assert len(asked) == 1
    let_go = threading.Event()
    server.fails = lambda _: 503 if let_go.wait(20) else 0
    began = time.monotonic()
    with pytest.raises(InputError, match=r"does not answer as it should \(ReadTimeout: timed out"):
        built(task, at(server, timeout=1, attempts=2))
    let_go.set()
    assert 1.9 < time.monotonic() - began < 15


def test_a_collection_whose_maker_got_no_answer(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 20)

    def loses_the_answer(asked: Asked) -> int:
        if asked[:2] == ("PUT", "") and not server.client.collection_exists("passages"):
            server._result("passages", asked)
            return 503
        return 0

    server.fails = loses_the_answer
    same(built(task, at(server)).search(task.queries, 5), searched(task, 5))


def test_goes_on_after_an_error(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 83)
    server.fails = lambda asked: 500 if len(server.sent()) > 30 else 0
    with pytest.raises(InputError, match="HTTP 500"):
        built(task, at(server, attempts=1))
    before = server.sent()
    assert (tmp_path / NAME).exists()
    server.fails = lambda _: 0
    # Another size of batches changes nothing of those that were begun.
    same(built(task, at(server, batch=7)).search(task.queries, 83), searched(task, 83))
    assert sorted(server.sent()[len(before) :]) == sorted(set(range(83)) - set(before))
    assert not (tmp_path / NAME).exists()
    server.asked.clear()
    built(task, at(server))
    assert not server.sent()  # all is there


CHILD = """
import sys
from pathlib import Path
import numpy as np
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.qdrant_index import QdrantIndex
from qrag_jax.retrieval.qdrant_settings import QdrantServer
folder = Path(sys.argv[2])
server = QdrantServer(sys.argv[1], batch=10, workers=3)
QdrantIndex.build(StoredCorpus(folder), np.load(folder / "v.npy"), folder, server=server)
"""


def test_goes_on_where_the_first_batch_is_missing(tmp_path: Path, server: StandIn) -> None:
    """From the start, the collection says what it is made from."""
    task = task_of(tmp_path, 83)

    def not_the_first(asked: Asked) -> int:
        first = asked[:2] == ("PUT", "/points") and asked.body["batch"]["ids"][:2] == [0, 1]
        return 500 if first else 0

    server.fails = not_the_first
    with pytest.raises(InputError, match="HTTP 500"):
        built(task, at(server, attempts=3, pause=0.2))
    assert set(server.sent()) > {0, 10}
    server.fails = lambda _: 0
    same(built(task, at(server)).search(task.queries, 83), searched(task, 83))


def test_a_bad_vector_stops_the_upload(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 83)
    task.vectors[77, 2] = np.nan
    parts = Vectors([task.vectors[:40], task.vectors[40:]])
    with pytest.raises(InputError, match="the vector 77, counted from 0, holds NaN"):
        QdrantIndex.build(task.corpus, parts, tmp_path, server=at(server))
    assert 77 not in server.sent()


def test_goes_on_after_a_kill(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 203)
    np.save(tmp_path / "v.npy", task.vectors)
    stuck, let_go = threading.Event(), threading.Event()

    def waits(asked: Asked) -> int:
        if asked.path == "/points" and len(server.sent()) > 90:
            stuck.set()
            let_go.wait(60)
        return 0

    server.fails = waits
    with subprocess.Popen([sys.executable, "-c", CHILD, server.url, str(tmp_path)]) as child:
        assert stuck.wait(60)
        time.sleep(0.3)  # what is confirmed is noted
        child.send_signal(signal.SIGKILL)
    before = len(server.sent())
    server.fails = lambda _: 0
    same(built(task, at(server)).search(task.queries, 203), searched(task, 203))
    again = server.sent()[before:]
    assert 203 - before <= len(again) <= 203 - before + 1 + 3 * 10
    let_go.set()


def test_goes_back_where_points_are_lost(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 83)
    server.fails = lambda asked: 500 if len(server.sent()) > 60 else 0
    with pytest.raises(InputError):
        built(task, at(server, attempts=1))
    server.fails = lambda _: 0
    server.client.delete_collection("passages")
    server.asked.clear()
    same(built(task, at(server)).search(task.queries, 83), searched(task, 83))
    assert set(server.sent()) == set(range(83))


def test_another_program_writes_to_the_collection(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 20)
    index = built(task, at(server))
    index.save(tmp_path)
    batch = {"ids": [77], "vectors": [[0.0] * 13]}
    server._result("passages", Asked("PUT", "/points", {"batch": batch}))
    with pytest.raises(InputError, match="has 21 points after 20 passages were sent, so that anot"):
        built(task, at(server))
    with pytest.raises(InputError, match="has 21 of 20 passages"):
        QdrantIndex.open(tmp_path, task.corpus)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QdrantServer("localhost:6333"), "the URL of Qdrant is 'localhost:6333'; give"),
        (lambda: QdrantServer("http://me:pass@db:6333"), r"has more than server and path \(db"),
        (lambda: QdrantServer("http://db/?api_key=pass"), "through QDRANT_API_KEY"),
        (lambda: QdrantServer(collection="a/b"), "the collection is 'a/b'; use letters"),
        (lambda: QdrantServer(batch=0), "config.qdrant.batch is 0; it must be at least 1"),
        (lambda: QdrantServer(pause=-1.0), "pause is -1.0"),
        (lambda: QdrantLayout(shards=0), "config.qdrant.shards is 0"),
        (lambda: QdrantLayout(m=-1), "config.qdrant.m is -1"),
        (lambda: QdrantSearch(oversampling=0.5), "oversampling is 0.5; it must be at least 1"),
        (lambda: QdrantSearch(oversampling=float("nan")), "oversampling is nan"),
        (lambda: QdrantSearch(oversampling=float("inf")), "oversampling is inf; use"),
    ],
)
def test_settings_check_themselves(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "pass@" not in str(error.value)
    assert "=pass" not in str(error.value)


def test_a_url_with_a_path() -> None:
    assert QdrantServer("https://db.example/qdrant/").url == "https://db.example/qdrant"


def test_a_replacement_that_was_begun_goes_on(tmp_path: Path, server: StandIn) -> None:
    task = task_of(tmp_path, 83)
    built(task, at(server))
    other = task._replace(vectors=task.vectors + 1)
    with pytest.raises(InputError, match="name another collection, or give replace=True"):
        built(other, at(server))
    server.asked.clear()
    server.fails = lambda asked: 500 if len(server.sent()) > 30 else 0
    with pytest.raises(InputError, match="HTTP 500"):
        built(other, at(server, attempts=1), replace=True)
    assert ("DELETE", "") in [asked[:2] for asked in server.asked]
    before = server.sent()
    server.asked.clear()
    server.fails = lambda _: 0
    same(built(other, at(server), replace=True).search(task.queries, 83), searched(other, 83))
    assert ("DELETE", "") not in [asked[:2] for asked in server.asked]
    assert sorted(server.sent()) == sorted(set(range(83)) - set(before))


def test_an_upload_tells_how_far_it_is_and_is_broken_off(tmp_path: Path, server: StandIn) -> None:
    task, counts = task_of(tmp_path, 83), list[int]()

    def told(passages: int) -> None:
        counts.append(passages)
        if passages > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built(task, at(server), told=told)
    assert counts == sorted(counts)
    assert 40 < counts[-1] < 83
    before = server.sent()
    counts.clear()
    built(task, at(server), told=counts.append)
    assert counts[-1] == 83
    assert not set(before) & set(server.sent()[len(before) :])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shard=3", "--qdrant_settings has 'shard=3'; write NAME=VALUE with commas between them"),
        ("url=http://a", "has 'url=http://a'; write NAME=VALUE"),
        ("shards", "has '' for shards; give a number such as 1"),
        ("shards=1.5", "has '1.5' for shards; give a number such as 1"),
        ("shards=0", "config.qdrant.shards is 0; it must be at least 1"),
        ("exact=yes", "has 'yes' for exact; give true or false"),
        ("oversampling=NaN", "has 'NaN' for oversampling; give a number such as 2.0"),
    ],
)
def test_settings_of_a_command_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        QdrantTarget.parse(text)


def test_settings_of_a_command_line_are_sorted() -> None:
    made = QdrantTarget.parse("shards=16,batch=64,exact=True,pause=1", url="http://db:6333/")
    assert made.server == QdrantServer("http://db:6333", batch=64, pause=1)
    assert made.layout == QdrantLayout(shards=16)
    assert made.search == QdrantSearch(exact=True)
    assert QdrantTarget.parse("") == QdrantTarget()


def test_the_key_goes_to_no_machine_that_a_folder_names(
    tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest may be anyone's, and its server would get the key with the first request."""
    task = task_of(tmp_path, 20)
    server.key = "right-0123"
    monkeypatch.setenv("QDRANT_API_KEY", server.key)
    with pytest.warns(UserWarning, match="insecure connection"):
        built(task, at(server)).save(tmp_path)
    with pytest.warns(UserWarning, match="insecure connection"):
        found = QdrantIndex.open(tmp_path, task.corpus)  # this machine: as it was
    same(found.search(task.queries, 5), searched(task, 5))
    path, theirs = tmp_path / "manifest.json", "http://theirs.invalid:6333"
    path.write_text(path.read_text().replace(server.url, theirs))
    with pytest.raises(InputError, match=f"names the Qdrant server at {theirs}, and QDRANT_API"):
        QdrantIndex.open(tmp_path, task.corpus)
    with pytest.warns(UserWarning, match="insecure connection"):
        found = QdrantIndex.open(tmp_path, task.corpus, server=at(server))
    same(found.search(task.queries, 5), searched(task, 5))
    monkeypatch.delenv("QDRANT_API_KEY")
    path.write_text(path.read_text().replace('"attempts": 6', '"attempts": 1'))
    with pytest.raises(InputError, match=r"theirs\.invalid:6333 does not answer"):
        QdrantIndex.open(tmp_path, task.corpus)

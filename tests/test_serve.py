"""The server as a process: its clients' own requests, errors, and how it starts and ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entry_points import Commands, refusal
from tests.serving.served import LIMIT, Served, serving, started
from tests.serving.small_index import WORDS, damage, words_index
from tests.systems.corpora import write_corpus_file, write_tower

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "index"
    words_index(folder)
    return folder


@pytest.fixture(scope="module")
def server(commands: Commands, index: Path) -> Iterator[Served]:
    with serving(commands, index) as server:
        yield server


# ---------------------------------------------------------------------- the clients' own requests


def titles_and_texts(result: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What Search-R1 and verl read of the hits of one query."""
    lines = [hit["document"]["contents"].split("\n") for hit in result]
    return [(title, "\n".join(text)) for title, *text in lines]


def test_search_r1_reads_its_results(server: Served) -> None:
    """The payload of its `_batch_search`, of which the answer's status is not looked at."""
    queries = ["cats and dogs", "all about rivers", "stars"]
    payload = {"queries": queries, "topk": 3, "return_scores": True}
    results = httpx.post(server.url + "/retrieve", json=payload, timeout=LIMIT).json()["result"]
    assert len(results) == 3
    assert titles_and_texts(results[2]) == [('"Stars"', "All about stars\nand more of it.")]
    assert titles_and_texts(results[0])[0][0] in ('"Cats"', '"Dogs"')
    for result in results:
        assert [hit.keys() for hit in result] == [{"document", "score"}] * len(result)
        scores = [hit["score"] for hit in result]
        assert scores == sorted(scores, reverse=True)
    # A step in which no episode searches, and one in which a model searched for nothing.
    assert server.post("/retrieve", payload | {"queries": []}).json() == {"result": []}
    mixed = server.post("/retrieve", payload | {"queries": ["stars", "", "rivers"]})
    assert mixed.status_code == 400
    told = mixed.json()
    assert told["error"] == "queries[1]: the question is empty; ask something."
    assert [titles_and_texts(result)[:1] for result in told["result"]] == [
        [('"Stars"', "All about stars\nand more of it.")],
        [],
        [('"Rivers"', "All about rivers\nand more of it.")],
    ]


def test_verl_reads_its_results(server: Served) -> None:
    """The request of its tool for search, which goes on only where the status is good."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    payload = {"queries": ["all about bridges"], "topk": 3, "return_scores": True}
    response = httpx.post(
        server.url + "/retrieve", headers=headers, content=json.dumps(payload), timeout=LIMIT
    )
    response.raise_for_status()
    results = response.json().get("result", [])
    assert titles_and_texts(results[0])[0] == ('"Bridges"', "All about bridges\nand more of it.")


def test_documents_come_bare_without_scores(server: Served) -> None:
    """Of a request with the queries alone, the count is the server's."""
    (result,) = server.post("/retrieve", {"queries": ["all about lamps"]}).json()["result"]
    assert len(result) == 3
    assert result[0] == {"id": "p9", "contents": '"Lamps"\nAll about lamps\nand more of it.'}
    scored = server.post("/retrieve", {"queries": ["all about lamps"], "return_scores": True})
    assert [hit["document"] for hit in scored.json()["result"][0]] == result


def test_the_search_of_its_own(server: Served) -> None:
    body = {"questions": ["all about stars", "all about cats"], "topk": 4, "where": {"page": [0]}}
    answer = server.post("/search", body)
    assert answer.status_code == 200
    first, second = answer.json()["hits"]
    assert [hit["id"] for hit in first] == ["p6", "p0", "p3", "p9"]
    assert [hit["id"] for hit in second] == ["p0", "p3", "p6", "p9"]
    score = first[0].pop("score")
    assert first[0] == {
        "step": 1,
        "id": "p6",
        "title": "Stars",
        "text": "All about stars\nand more of it.",
        "metadata": {"page": 0},
    }
    above = server.post("/search", body | {"threshold": score - 0.01}).json()["hits"]
    assert [[hit["id"] for hit in hits] for hits in above] == [["p6"], ["p0"]]


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1", "[::1", "a@b", ""])
def test_a_page_whose_name_was_made_to_mean_this_machine_reads_nothing(
    server: Served, host: str
) -> None:
    body = {"questions": ["all about stars"]}
    answer = httpx.post(server.url + "/search", json=body, headers={"Host": host}, timeout=LIMIT)
    assert (answer.status_code, answer.json().keys()) == (403, {"error"})
    assert answer.json()["error"].startswith("the request names another machine (Host); ask by")


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "[::1]:80", "127.0.0.5"])
def test_names_of_this_machine_are_good(server: Served, host: str) -> None:
    answer = httpx.get(server.url + "/health", headers={"Host": host}, timeout=LIMIT)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/retrieve", '{"queries": ["a', 400, 'the body is no JSON; send an object such as {"qu'),
        ("/retrieve", "", 400, "the body is no JSON object"),
        ("/retrieve", "[1]", 400, "the body is no JSON object"),
        (
            "/retrieve",
            b'{"queries": ["\xff"]}',
            400,
            "the body cannot be read; send JSON in UTF-8.",
        ),
        ("/retrieve", "[" * 100_000, 400, "the body cannot be read"),
        ("/retrieve", "{}", 400, "the field queries is missing; send it."),
        ("/retrieve", '{"queries": "cats"}', 400, "queries: input should be a valid list."),
        ("/retrieve", '{"queries": ["a", 7]}', 400, "queries[1]: input should be a valid string."),
        ("/retrieve", '{"queries": ["a"], "topk": "3"}', 400, "topk: input should be a valid int"),
        ("/retrieve", '{"queries": ["a"], "topk": 0}', 400, "topk is 0, and the corpus has 10"),
        ("/retrieve", '{"queries": ["a"], "topk": 11}', 400, "topk is 11, and the corpus has 10 "),
        ("/retrieve", '{"queries": [" "]}', 400, "queries[0]: the question is empty"),
        ("/retrieve", '{"queries": ["\\ud800"]}', 400, "queries[0]: the question holds half of"),
        ("/search", '{"questions": ["a", ""]}', 400, "questions[1]: the question is empty"),
        ("/search", '{"questions": ["a"], "topk": 11}', 400, "questions[0]: topk is 11, and the"),
        ("/search", '{"questions": ["a"], "steps": 2}', 400, "questions[0]: steps is 2, but this"),
        ("/search", '{"questions": ["a"], "stpes": 2}', 400, "the field stpes is unknown; use que"),
        (
            "/search",
            '{"questions": ["a"], "where": {"no": 1}}',
            400,
            "where has the field 'no', wh",
        ),
        ("/search", '{"questions": ["a"], "where": {"page": {}}}', 400, "where.page: "),
        ("/search", '{"questions": ["a"], "where": 7}', 400, "where: input should be a valid dict"),
        (
            "/search",
            '{"questions": ["a"], "threshold": NaN}',
            400,
            "threshold: input should be a f",
        ),
        (
            "/retrieve",
            json.dumps({"queries": ["a"] * 1025}),
            413,
            "1025 questions; send at most 1024",
        ),
        ("/retrieve", " " * (8 * 2**20 + 1), 413, "the body is longer than 8388608 bytes"),
        ("/elsewhere", "{}", 404, "there is nothing at this address; use /retrieve, /search,"),
    ],
)
def test_what_is_refused_is_told_in_a_sentence(
    path: str, body: str | bytes, status: int, told: str, server: Served
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + path, content=body, headers=headers, timeout=LIMIT)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert told in error
    assert error.endswith(".")
    assert "\n" not in error


def test_a_body_that_is_not_said_to_be_json_is_refused(server: Served) -> None:
    """As of `curl -d`, and of a page in a browser, which may send such a body to any address."""
    body = {"content": '{"queries": ["cats"]}', "headers": {"Content-Type": "text/plain"}}
    answer = httpx.post(server.url + "/retrieve", timeout=LIMIT, **body)
    assert answer.status_code == 400
    assert "send the header Content-Type: application/json." in answer.json()["error"]


def test_other_methods_are_refused(server: Served) -> None:
    answer = httpx.get(server.url + "/retrieve", timeout=LIMIT)
    assert answer.status_code == 405
    assert answer.json() == {"error": "this address takes POST alone."}


def test_errors_are_counted_by_kind(server: Served) -> None:
    bad = 'qrag_errors_total{kind="bad_request"}'
    answered = 'qrag_requests_total{endpoint="/search",status="400"}'
    server.post("/search", {"questions": [""]})
    before = server.measure(bad), server.measure(answered)
    server.post("/search", {"questions": [""]})
    assert (server.measure(bad), server.measure(answered)) == (before[0] + 1, before[1] + 1)
    assert server.measure('qrag_errors_total{kind="internal"}') == 0
    assert server.measure('qrag_request_seconds_count{endpoint="/search"}') > 0


def test_a_fault_inside_is_told_logged_and_counted(commands: Commands, tmp_path: Path) -> None:
    words_index(tmp_path)
    server = started(commands, tmp_path)
    damage(tmp_path, "mountains")
    with ThreadPoolExecutor(8) as pool:
        asks = [{"queries": [word], "topk": 1} for word in WORDS]
        answers = list(pool.map(lambda ask: server.post("/retrieve", ask), asks))
    for word, answer in zip(WORDS, answers, strict=True):
        if word == "mountains":
            assert answer.status_code == 500
            assert answer.json() == {"error": "the search failed; the server's log says where."}
        else:
            assert answer.json()["result"][0][0]["contents"].startswith(f'"{word.title()}"')
    assert server.measure('qrag_errors_total{kind="internal"}') == 1
    server.process.terminate()
    status, told = server.ended()
    assert status == 0
    assert "failed with InputError:" in told
    assert 'File "' in told
    assert not any(word in told.lower() for word in WORDS)  # queries are not logged


# ---------------------------------------------------------------------- many at once


def test_requests_at_once_are_searched_together(commands: Commands, index: Path) -> None:
    with serving(commands, index, "--max_batch=16", "--max_wait_ms=20") as server:
        alone = {word: server.post("/retrieve", {"queries": [word]}).json() for word in WORDS}
        before = server.measure("qrag_batch_questions_count")
        with (
            httpx.Client(timeout=LIMIT, limits=httpx.Limits(max_connections=32)) as client,
            ThreadPoolExecutor(32) as pool,
        ):
            asked = WORDS * 20
            answers = list(
                pool.map(
                    lambda word: client.post(server.url + "/retrieve", json={"queries": [word]}),
                    asked,
                )
            )
        assert [answer.json() for answer in answers] == [alone[word] for word in asked]
        searches = server.measure("qrag_batch_questions_count") - before
        assert searches < len(asked) / 2
        assert server.measure("qrag_batch_questions_sum") == len(asked) + len(WORDS)
        assert server.measure('qrag_batch_questions_bucket{le="16.0"}') == searches + before


def test_a_full_queue_and_a_client_that_leaves(commands: Commands, index: Path) -> None:
    flags = ("--max_queue=2", "--max_batch=8", "--max_wait_ms=8000")
    with serving(commands, index, *flags) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/retrieve", json={"queries": ["cats", "dogs"]}, timeout=0.5)
        until = time.monotonic() + LIMIT
        while not server.measure('qrag_errors_total{kind="client_gone"}'):
            assert time.monotonic() < until
            time.sleep(0.05)
        # The places of those who left are free, and nobody else's are. A slow machine may answer
        # those who wait before it is asked again: then they are asked once more.
        times, full = 0, None
        while full is None or (full.status_code == 200 and times < 5):
            times += 1
            kept = server.later("/retrieve", {"queries": ["stars", "lamps"]})
            while server.measure("qrag_queue_questions") != 2 and not kept.done():
                assert time.monotonic() < until
            full = server.post("/retrieve", {"queries": ["rivers"]})
            assert [hits[0]["id"] for hits in kept.result(LIMIT).json()["result"]] == ["p6", "p9"]
        assert full.status_code == 503
        assert full.headers["Retry-After"] == "1"
        assert full.json() == {"error": "2 questions wait already; ask again later."}
        assert server.measure('qrag_errors_total{kind="busy"}') == 1
        # Those who left are not among them.
        assert server.measure("qrag_batch_questions_sum") == 3 * times - 1


# ---------------------------------------------------------------------- start and end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_when_what_waits_is_answered(
    number: signal.Signals, commands: Commands, index: Path
) -> None:
    server = started(commands, index, "--max_wait_ms=20000")
    waiting = [server.later("/retrieve", {"queries": [word]}) for word in WORDS]
    until = time.monotonic() + LIMIT
    while server.measure("qrag_queue_questions") < len(WORDS):
        assert time.monotonic() < until
    begun = time.monotonic()
    os.kill(server.process.pid, number)
    answers = [answer.result(LIMIT) for answer in waiting]
    titles = [answer.json()["result"][0][0]["contents"].split("\n")[0] for answer in answers]
    assert titles == [f'"{word.title()}"' for word in WORDS]
    status, told = server.ended()
    assert status == 0, told
    assert f"stopped by {number.name}" in told
    assert time.monotonic() - begun < 10  # nobody waits for more questions
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health", timeout=LIMIT)


def test_half_a_body_does_not_hold_the_end(commands: Commands, index: Path) -> None:
    server = started(commands, index)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        head = "POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 100\r\n\r\n".encode() + b'{"questions": [')
        time.sleep(1)  # so that it waits for the rest
        begun = time.monotonic()
        server.process.terminate()
        assert server.ended()[0] == 0
    assert time.monotonic() - begun < 20


def test_killed_and_started_again_it_answers(commands: Commands, index: Path) -> None:
    server = started(commands, index)
    port = int(server.url.rpartition(":")[2])
    assert httpx.get(server.url + "/health", timeout=LIMIT).json()["status"] == "ready"
    server.process.kill()
    status, _ = server.ended()
    assert status == -signal.SIGKILL
    begun = time.monotonic()
    again = started(commands, index, port=port)
    assert again.url == server.url
    (result,) = again.post("/retrieve", {"queries": ["stars"]}).json()["result"]
    assert result[0]["id"] == "p6"
    assert time.monotonic() - begun < LIMIT / 2
    again.process.terminate()
    assert again.ended()[0] == 0


def test_health_says_what_is_served(server: Served) -> None:
    answer = httpx.get(server.url + "/health", timeout=LIMIT)
    assert answer.status_code == 200
    told = answer.json()
    assert (told["status"], told["passages"], told["steps"]) == ("ready", len(WORDS), 1)
    assert server.url.startswith("http://127.0.0.1:")


def test_what_cannot_be_served(commands: Commands, index: Path, tmp_path: Path) -> None:
    def told(*flags: str) -> str:
        return refusal(commands.run("serve", "--port=0", *flags))

    assert "give the folder of an index" in told()
    assert "holds no finished index; build one there with qrag index" in told(f"--index={tmp_path}")
    own = f"--index={index}"
    assert "the engine exact compares vectors; give what" in told(own, "--engine=exact")
    assert "compares words; leave --encoder out, or" in told(own, "--encoder=minilm")
    assert "--pooling is for a search with --encoder; leave it out" in told(own, "--pooling=cls")
    assert "give one of --workdir and --encoder." in told(own, "--encoder=a", "--workdir=b")
    assert "--max_batch" in told(own, "--max_batch=0")
    open_to_all = told(own, "--host=0.0.0.0")
    assert "can be reached from other machines" in open_to_all
    assert "add --expose" in open_to_all
    assert "is no address" in told(own, "--host=no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port={port} cannot be used" in told(own, f"--port={port}")


def test_vectors_are_served_and_health_waits_for_them(commands: Commands, tmp_path: Path) -> None:
    tower = write_tower(tmp_path / "tower")
    source = write_corpus_file(tmp_path / "corpus.jsonl", 20)
    commands.succeed("index", f"--corpus={source}", f"--index={tmp_path}/i", f"--encoder={tower}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    flags = (f"--index={tmp_path}/i", f"--encoder={tower}", f"--port={port}", "--max_batch=8")
    server = Served(f"http://127.0.0.1:{port}", commands.start("serve", *flags))
    told: list[str] = []
    until = time.monotonic() + LIMIT
    while "ready" not in told:
        assert time.monotonic() < until
        with contextlib.suppress(httpx.ConnectError):
            answer = httpx.get(server.url + "/health", timeout=LIMIT)
            told.append(answer.json().get("status") or answer.json()["error"])
            if answer.status_code == 503:
                refused = server.post("/search", {"questions": ["river"]})
                assert refused.status_code in (200, 503)
    assert set(told) == {"the server is loading; ask again later.", "ready"}
    assert server.process.stdout.readline().strip() == server.url
    (hits,) = server.post("/search", {"questions": ["silver river"], "topk": 20}).json()["hits"]
    assert sorted(hit["id"] for hit in hits) == sorted(f"p{n}" for n in range(20))
    long = server.post("/search", {"questions": ["river", "river " * 70]})
    assert long.status_code == 400
    error = "questions[1]: the question is longer than the encoder reads; ask a shorter one."
    assert long.json() == {"error": error}
    server.process.terminate()
    status, log = server.ended()
    assert status == 0, log

"""The server as a process: its clients' own requests, errors, and how it starts and ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from starlette.testclient import TestClient

from qrag_jax.retrieval.index_folder import IndexAt
from qrag_jax.serving import app
from qrag_jax.serving.searcher import Searcher, Worker
from qrag_jax.systems.retriever import open_plain
from tests.entry_points import ROOT, Commands, refusal, wait_until
from tests.serving.served import LIMIT, WORDS, Served, damage, serving, started, words_index


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


def test_search_r1_and_verl_read_their_results(server: Served) -> None:
    """The payload of Search-R1's `_batch_search`, which does not look at the answer's status."""
    payload = {"queries": ["cats and dogs", "stars"], "topk": 3, "return_scores": True}
    results = server.post("/retrieve", payload).json()["result"]
    stars = ('"Stars"', "All about stars\nand more of it.")
    assert titles_and_texts(results[0])[0][0] in ('"Cats"', '"Dogs"')
    assert titles_and_texts(results[1]) == [stars]
    # A step in which no episode searches, and one in which a model searched for nothing.
    assert server.post("/retrieve", payload | {"queries": []}).json() == {"result": []}
    mixed = server.post("/retrieve", payload | {"queries": ["stars", ""]})
    assert mixed.status_code == 400
    assert "queries[1]" in mixed.json()["error"]
    assert [titles_and_texts(result) for result in mixed.json()["result"]] == [[stars], []]
    # Without scores documents come bare.
    (bare,) = server.post("/retrieve", {"queries": ["all about lamps"]}).json()["result"]
    assert bare[0] == {"id": "p9", "contents": '"Lamps"\nAll about lamps\nand more of it.'}


# ---------------------------------------------------------------------- errors


def test_a_page_whose_name_was_made_to_mean_this_machine_reads_nothing(server: Served) -> None:
    body = {"questions": ["all about stars"]}
    for host in ("evil.example", "10.0.0.1:80", "[::1", "a@b", ""):
        headers = {"Host": host}
        answer = httpx.post(server.url + "/search", json=body, headers=headers, timeout=LIMIT)
        assert (answer.status_code, answer.json().keys()) == (403, {"error"}), host
    for host in ("localhost", "[::1]:80", "127.0.0.5"):
        answer = httpx.get(server.url + "/health", headers={"Host": host}, timeout=LIMIT)
        assert answer.status_code == 200, host


def test_what_is_refused_is_one_line_and_counted(server: Served) -> None:
    def refused(path: str, body: Any, status: int = 400, kind: str = "application/json") -> str:
        content = body if isinstance(body, str) else json.dumps(body)
        headers = {"Content-Type": kind}
        answer = httpx.post(server.url + path, content=content, headers=headers, timeout=LIMIT)
        assert answer.status_code == status, (body, answer.text)
        assert "\n" not in answer.json()["error"]
        return answer.json()["error"]

    assert "questions[1]" in refused("/search", {"questions": ["a", ""]})
    assert "where.page" in refused("/search", {"questions": ["a"], "where": {"page": {}}})
    assert server.measure('qrag_requests_total{endpoint="/search",status="400"}') == 2
    assert "body" in refused("/retrieve", '{"queries": ["a')
    assert "topk" in refused("/retrieve", {"queries": ["a"], "topk": 11})
    assert "1024" in refused("/retrieve", {"queries": ["a"] * 1025}, 413)
    refused("/retrieve", " " * (8 * 2**20 + 1), 413)
    refused("/elsewhere", {}, 404)
    # A body of `curl -d`, and of a page in a browser, which may send such to any address.
    assert "Content-Type" in refused("/retrieve", {"queries": ["cats"]}, kind="text/plain")


# ---------------------------------------------------------------------- start and end


def test_a_signal_stops_it_when_what_waits_is_answered(commands: Commands, tmp_path: Path) -> None:
    """A fault inside is of its question alone; the log says where it was, and no question."""
    words_index(tmp_path)
    server = started(commands, tmp_path, "--max_wait_ms=20000")
    damage(tmp_path, "mountains")
    waiting = {word: server.later("/retrieve", {"queries": [word]}) for word in WORDS}
    until = time.monotonic() + LIMIT
    while server.measure("qrag_queue_questions") < len(WORDS):
        assert time.monotonic() < until
    begun = time.monotonic()
    os.kill(server.process.pid, signal.SIGTERM)
    answers = {word: answer.result(LIMIT) for word, answer in waiting.items()}
    assert answers.pop("mountains").status_code == 500
    assert all(answer.status_code == 200 for answer in answers.values())
    status, log = server.ended()
    assert status == 0
    assert time.monotonic() - begun < 10  # nobody waits for more questions
    assert "JSONDecodeError" in log
    assert not any(word in log.lower() for word in WORDS)


def test_what_cannot_be_served(commands: Commands, index: Path, tmp_path: Path) -> None:
    own = f"--index={index}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"--port={taken.getsockname()[1]}"
        for flags, name in (
            ([f"--index={tmp_path}"], str(tmp_path)),
            ([own, "--engine=exact"], "exact"),
            ([own, "--host=0.0.0.0"], "--expose"),
            ([own, port], port),
        ):
            assert name in refusal(commands.run("serve", "--port=0", *flags))


def test_health_waits_for_the_index(index: Path) -> None:
    go = threading.Event()

    def opener() -> Searcher:
        assert go.wait(LIMIT)
        return Searcher(open_plain(IndexAt(index)))

    worker = Worker(opener)
    client = TestClient(app.make_app(worker, only_here=True), base_url="http://127.0.0.1")
    worker.start()
    assert client.get("/health").status_code == 503
    assert client.post("/search", json={"questions": ["cats"]}).status_code == 503
    go.set()
    worker.loaded.result(LIMIT)
    assert client.get("/health").json()["passages"] == len(WORDS)
    assert worker.close(LIMIT)


def test_a_changed_index_is_taken_over_while_all_questions_are_answered(
    commands: Commands, tmp_path: Path
) -> None:
    """Also if a second change comes before the first is taken, or one cannot be opened."""
    index, ids = tmp_path / "index", tmp_path / "ids.txt"
    words_index(index)
    more = tmp_path / "more.jsonl"
    own = (f"--index={index}", f"--add={more}")

    def titles(server: Served, question: str) -> list[str]:
        answer = server.post("/search", {"questions": [question], "topk": 3})
        assert answer.status_code == 200, answer.text
        return [hit["title"] for hit in answer.json()["hits"][0]]

    def taken_over(server: Served, passages: int) -> bool:
        """Whether it is, after questions whose words all versions have."""
        assert "Lamps" in titles(server, "lamps")
        return httpx.get(server.url + "/health", timeout=LIMIT).json()["passages"] == passages

    with serving(commands, index, "--engine=bm25") as server:
        assert titles(server, "stars") == ["Stars"]
        ids.write_text("p6\n")  # of "stars"
        for number, word in enumerate(("planets", "comets")):
            more.write_text(json.dumps({"id": f"new {number}", "title": word, "text": word}) + "\n")
            removed = () if number else (f"--remove={ids}",)
            commands.succeed("index", *own, *removed)
        wait_until(lambda: taken_over(server, len(WORDS) + 1), server.process)
        assert titles(server, "planets comets stars") == ["planets", "comets"]
        shutil.copytree(index / "version-3" / "corpus", index / "version-4" / "corpus")
        (index / "current").write_text("version-4")  # it has no engine
        time.sleep(1.5)
        assert titles(server, "comets") == ["comets"]


# -------------------------------------------------- as a tool (MCP)


def test_a_client_finds_the_tool_and_searches(
    commands: Commands, index: Path, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = [
        {"question": "all about rivers", "topk": 2},
        {"question": "all about rivers", "where": {"page": 0}},
        {"question": "cats", "where": {"pages": 0}},
    ]
    words = ["-m", "qrag_jax.serve", "--mcp", f"--index={index}"]
    server = StdioServerParameters(
        command=sys.executable, args=words, env=commands.environment, cwd=ROOT
    )

    async def run() -> Any:
        with (tmp_path / "log").open("w") as file:
            async with (
                stdio_client(server, errlog=file) as (reading, writing),
                ClientSession(reading, writing) as session,
            ):
                await session.initialize()
                tools = (await session.list_tools()).tools
                return tools, [await session.call_tool("search", each) for each in asked]

    (tool,), answers = asyncio.run(asyncio.wait_for(run(), LIMIT))
    assert tool.name == "search"
    assert tool.input_schema["required"] == ["question"]
    found, filtered, refused = answers
    assert not found.is_error
    hits = found.structured_content["hits"]
    assert json.loads(found.content[0].text) == {"hits": hits}
    assert len(hits) == 2
    assert (hits[0]["id"], hits[0]["title"], hits[0]["metadata"]) == ("p4", "Rivers", {"page": 1})
    assert {hit["metadata"]["page"] for hit in filtered.structured_content["hits"]} == {0}
    assert refused.is_error
    assert "pages" in refused.content[0].text
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "rivers" not in log


def test_a_signal_ends_it_while_its_client_reads_nothing(commands: Commands, index: Path) -> None:
    words = [sys.executable, "-m", "qrag_jax.serve", "--mcp", f"--index={index}"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    client = {"name": "test", "version": "1"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    call = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    line = json.dumps(call).encode() + b"\n"
    with subprocess.Popen(words, cwd=ROOT, env=commands.environment, **pipes) as process:
        process.stdin.write(line)
        assert json.loads(process.stdout.readline())["id"] == 1  # it has started
        os.set_blocking(process.stdin.fileno(), False)
        full = 0
        while full < 5:  # half a second in which it takes nothing: both pipes are full
            full = 0 if process.stdin.write(line) else full + 1
            time.sleep(0.1 * bool(full))
        process.terminate()
        assert process.wait(LIMIT) == 0  # its input is still open

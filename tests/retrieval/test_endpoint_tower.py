"""A tower behind a server: retries, replies that are no vectors, and a factor that servers skip."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.client.replies import read_outcome
from qrag_jax.llm.outcomes import Embedded, EmbeddingRequest, Failure
from qrag_jax.retrieval.endpoint_tower import EndpointTower

WIDTH = 4
ROWS = [[2, 7 + n, 3] for n in range(70)]  # more than one request


def vector(row: list[int]) -> list[float]:
    return [float(row[1]), 1.0, 0.0, -2.0]


def data(rows: list[list[int]], of: Callable[[list[int]], list[float]] = vector) -> dict[str, Any]:
    return {"data": [{"index": i, "embedding": of(row)} for i, row in enumerate(rows)]}


class Server(http.server.ThreadingHTTPServer):
    """Replies with what `reply` gives for (number of the request from 0, its rows)."""

    reply: Callable[[int, list[list[int]]], tuple[int, Any]]
    asked: list[dict[str, Any]]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        status, body = self.server.reply(len(self.server.asked) - 1, asked["input"])
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        made.asked = []
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def tower_of(server: Server, scale: float = 1.0) -> EndpointTower:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    config = ClientConfig(url, "chunk", attempts=3, retry_pause=0.01, wait_limit=1.0)
    return EndpointTower(config, WIDTH, scale)


def test_rows_of_ids_become_vectors_in_order(server: Server) -> None:
    server.reply = lambda number, rows: (503, {}) if number == 0 else (200, data(rows))
    tower = tower_of(server)
    np.testing.assert_array_equal(tower(ROWS), np.array([vector(row) for row in ROWS], np.float32))
    # The one that failed was sent again.
    assert sorted(len(asked["input"]) for asked in server.asked[1:]) == [6, 32, 32]
    assert {asked["model"] for asked in server.asked} == {"chunk"}
    assert tower([]).shape == (0, WIDTH)
    tower.close()


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((400, {"error": {"message": "no ids"}}), "gives no vectors"),
        ((200, b"<html>"), "the reply has no vectors: <html>"),
        ((200, {"data": []}), "vector for each"),
        ((200, data(ROWS[:2], lambda row: [1.0, 2.0])), "vectors of 2"),
        ((200, data(ROWS[:2], lambda row: [float("nan")] * WIDTH)), "NaN or infinite"),
    ],
)
def test_other_replies_are_told_of(server: Server, reply: tuple[int, Any], told: str) -> None:
    server.reply = lambda number, rows: reply
    tower = tower_of(server)
    with pytest.raises(InputError, match=told):
        tower(ROWS[:2])
    tower.close()


@pytest.mark.parametrize("skipped", [True, False])
def test_a_factor_that_the_server_skips_is_multiplied(server: Server, skipped: bool) -> None:
    own = 1.0 if skipped else 3.0

    def of(row: list[int]) -> list[float]:
        found = np.array(vector(row))
        return (own * found / np.linalg.norm(found)).tolist()

    server.reply = lambda number, rows: (200, data(rows, of))
    tower = tower_of(server, scale=3.0)
    np.testing.assert_allclose(np.linalg.norm(tower(ROWS[:3]), axis=1), 3.0, rtol=1e-6)
    server.reply = lambda number, rows: (200, data(rows))
    with pytest.raises(InputError, match="serve the exported"):
        tower(ROWS[:3])
    tower.close()


def test_replies_are_read_by_the_request() -> None:
    request = EmbeddingRequest(((1, 2), (3,)))
    assert request.body("m") == {"model": "m", "input": [[1, 2], [3]], "encoding_format": "float"}
    good = {"data": [{"index": 1, "embedding": [3, 4]}, {"index": 0, "embedding": [1, 2]}]}
    found = read_outcome(request, json.dumps(good | {"usage": {"prompt_tokens": 3}}), "v")
    assert isinstance(found, Embedded)
    assert found.vectors == ((1.0, 2.0), (3.0, 4.0))
    assert (found.version, found.usage.prompt_tokens) == ("v", 3)
    for wrong in (
        {"data": [{"index": 0, "embedding": [1]}, {"index": 0, "embedding": [1]}]},
        {"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1, 2]}]},
        {"data": [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": [1]}]},
        {"data": [None, None]},
        [],
    ):
        found = read_outcome(request, json.dumps(wrong), "v")
        assert isinstance(found, Failure)
        assert found.cause == "malformed"

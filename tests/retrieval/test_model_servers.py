"""Towers and rerankers behind a server: retries, wrong replies, failures that are marked."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from qrag_jax.retrieval.own_documents import endpoint_scorer
from qrag_jax.retrieval.towers import EndpointTower
from tests.json_server import Call as HttpCall
from tests.json_server import listening
from tests.llm.model_server import ModelServer, Reply

WIDTH = 4


ROWS = [[2, 7 + n, 3] for n in range(70)]  # more than one request


def vector(row: list[int]) -> list[float]:
    return [float(row[1]), 1.0, 0.0, -2.0]


def data(rows: list[list[int]], of: Callable[[list[int]], list[float]] = vector) -> dict[str, Any]:
    return {"data": [{"index": i, "embedding": of(row)} for i, row in enumerate(rows)]}


@contextlib.contextmanager
def tower_of(
    reply: Callable[[int, list[list[int]]], tuple[int, Any]], scale: float = 1.0
) -> Iterator[tuple[EndpointTower, list[Any]]]:
    """A tower and what it asked; the reply is to (number of the request from 0, its rows)."""
    asked: list[Any] = []

    def answer(call: HttpCall) -> tuple[int, Any]:
        asked.append(json.loads(call.body))
        return reply(len(asked) - 1, asked[-1]["input"])

    with listening(answer) as url:
        config = ClientConfig(f"{url}/v1", "chunk", attempts=3, retry_pause=0.01, wait_limit=1.0)
        tower = EndpointTower(config, WIDTH, scale)
        yield tower, asked
        tower.close()


def test_rows_of_ids_become_vectors_in_order() -> None:
    """Also after a failure that passes."""

    def reply(number: int, rows: list[list[int]]) -> tuple[int, Any]:
        return (200, {"data": data(rows)["data"][::-1]}) if number else (503, {})

    with tower_of(reply) as (tower, asked):
        np.testing.assert_array_equal(tower(ROWS), np.array([vector(r) for r in ROWS], np.float32))
        assert sorted(len(each["input"]) for each in asked[1:]) == [6, 32, 32]
        assert {each["model"] for each in asked} == {"chunk"}
        assert tower([]).shape == (0, WIDTH)


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


TEXTS = ["red cat", "red red cat", "blue dog", "red dog", "green cow", "blue cat"]


@pytest.fixture
def client(model_server: ModelServer) -> Iterator[Client]:
    settings: dict[str, Any] = {"attempts": 3, "attempt_timeout": 5.0, "deadline": 10.0}
    settings |= {"retry_pause": 0.01, "wait_limit": 0.3}
    with Client(ClientConfig(model_server.url, "tiny", **settings), log=lambda line: None) as made:
        yield made


def test_a_server_orders_the_documents(model_server: ModelServer, client: Client) -> None:
    """The server sends the best first, so the scores have to find their documents again."""
    queries, documents = ["cat dog blue", "none", "cow"], [TEXTS, [], TEXTS[4:]]
    found = endpoint_scorer(client)(queries, documents)
    assert all(scores is not None for scores in found)
    assert [scores.tolist() for scores in found] == [  # type: ignore[union-attr]
        [1.0, 1.0, 2.0, 1.0, 0.0, 2.0],
        [],
        [1.0, 0.0],
    ]
    calls = {call.body["query"]: call for call in model_server.calls}
    assert calls.keys() == {"cat dog blue", "cow"}  # no request without documents
    assert calls["cow"].path == "/v1/rerank"
    body = {"model": "tiny", "query": "cow", "documents": TEXTS[4:]}
    assert calls["cow"].body == body


def results(*pairs: tuple[int, Any]) -> Reply:
    found = [{"index": index, "relevance_score": score} for index, score in pairs]
    return Reply(raw=json.dumps({"results": found}))


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        *((Reply(status=500), "server"), (Reply(status=404), "request")),
        (Reply(status=400, text="longer than the maximum model length"), "too_long"),
        *((Reply(raw="{}"), "malformed"), (Reply(raw="no JSON"), "malformed")),
        *((results((0, 1.0)), "malformed"), (results((0, 1.0), (0, 2.0)), "malformed")),
        *((results((0, 1.0), each), "malformed") for each in ((2, 2.0), (1, math.nan), (1, None))),
        (Reply(drop=True), "connection"),
    ],
)
def test_a_failure_is_no_scores(
    reply: Reply, cause: str, model_server: ModelServer, client: Client
) -> None:
    model_server.script = lambda call: reply if call.prompt == "bad" else Reply()
    documents = [TEXTS[3:5], TEXTS[1:3]]
    bad, good = endpoint_scorer(client)(["bad", "dog"], documents)
    assert bad is None
    assert good is not None
    assert good.tolist() == [0.0, 1.0]
    assert client.counters().failures[cause] == 1


@pytest.mark.parametrize("skipped", [True, False])
def test_a_factor_that_the_server_skips_is_multiplied(skipped: bool) -> None:
    def unit(row: list[int]) -> list[float]:
        found = np.array(vector(row))
        return ((1.0 if skipped else 3.0) * found / np.linalg.norm(found)).tolist()

    with tower_of(lambda n, rows: (200, data(rows, unit)), scale=3.0) as (tower, _):
        np.testing.assert_allclose(np.linalg.norm(tower(ROWS[:3]), axis=1), 3.0, rtol=1e-6)
    tower = tower_of(lambda n, rows: (200, data(rows)), scale=3.0)
    with tower as (other, _), pytest.raises(InputError, match="export"):
        other(ROWS[:3])
    for wrong in ([1.0, 2.0], [float("nan")] * WIDTH):  # of another width, no numbers
        reply = data(ROWS[:2], lambda row, wrong=wrong: wrong)
        tower = tower_of(lambda n, rows, reply=reply: (200, reply))
        with tower as (other, _), pytest.raises(InputError, match="chunk"):
            other(ROWS[:2])

"""A server's search through the same method, and through every adapter, and what it refuses."""

from __future__ import annotations

import math
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax import Retriever
from qrag_jax.errors import InputError
from qrag_jax.integrations.remote import RemoteRetriever
from qrag_jax.retrieval.multi_step import Hit
from tests.entry_points import Commands
from tests.integrations.conftest import COUNT
from tests.integrations.test_adapters import QUESTION, QUESTIONS, LangChain
from tests.json_server import listening
from tests.serving.served import serving


@pytest.fixture(scope="module")
def remote(commands: Commands, index: Path, exported: Path) -> Iterator[RemoteRetriever]:
    with serving(commands, index, f"--retriever={exported}", "--compute=float32") as server:
        yield RemoteRetriever(server.url)


def same(found: list[list[Hit]], expected: list[list[Hit]]) -> None:
    for hits, own in zip(found, expected, strict=True):
        assert [hit._replace(score=0) for hit in hits] == [hit._replace(score=0) for hit in own]
        scores = ([hit.score for hit in some] for some in (hits, own))
        np.testing.assert_allclose(*scores, atol=2e-5)


def test_the_hits_are_those_of_the_retriever(remote: RemoteRetriever, retriever: Retriever) -> None:
    for settings in (
        {},
        {"steps": 1, "beam": 3},
        {"threshold": -math.inf},
        {"threshold": retriever.search(QUESTION)[1].score},
        {"where": {"page": {0, 2}}, "topk": 5},
    ):
        expected = retriever.search(QUESTIONS, **settings)  # type: ignore[arg-type]
        same(remote.search(QUESTIONS, **settings), expected)  # type: ignore[arg-type]
        same([remote.search(QUESTION, **settings)], expected[:1])  # type: ignore[arg-type]
    assert remote.search([]) == []
    many = [f"{question} {number}" for number in range(20) for question in QUESTIONS]
    same(remote.search(many), retriever.search(many))


def test_an_adapter_takes_a_server(remote: RemoteRetriever, retriever: Retriever) -> None:
    library = LangChain()
    again = pickle.loads(pickle.dumps(remote))  # noqa: S301
    found = library.search(library.adapter(again, 5), QUESTION)
    assert [each.id for each in found] == [hit.id for hit in retriever.search(QUESTION, topk=5)]


def test_what_is_refused_names_the_server_and_the_setting(remote: RemoteRetriever) -> None:
    for settings, name in (
        ({"where": {"colour": 1}}, "colour"),
        ({"topk": COUNT + 1}, "topk"),
        ({"steps": 3}, "steps"),
        ({"threshold": math.nan}, "threshold"),
    ):
        with pytest.raises(InputError, match=name) as caught:
            remote.search(QUESTION, **settings)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{remote.url}: ")
    with pytest.raises(InputError, match="question"):
        remote.search([QUESTION, " "])
    with pytest.raises(InputError, match=r"127\.0\.0\.1:8000"):
        RemoteRetriever("127.0.0.1:8000")
    with pytest.raises(InputError) as refused:
        RemoteRetriever("http://me:secret@a.b:8000")
    assert "secret" not in str(refused.value)
    with socket.socket() as taken:  # it does not listen
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=url):
            RemoteRetriever(url).search(QUESTION)


def test_what_is_no_answer_of_a_search() -> None:
    answers: list[tuple[int, Any]] = [(200, {"result": []}), (200, {"hits": [[{"id": "p1"}]]})]
    for status, answer in [*answers, (200, ["hits"]), (404, {"detail": "Not Found"})]:
        with (
            listening(lambda call, reply=(status, answer): reply) as url,
            pytest.raises(InputError, match=rf"{url}.*HTTP {status}"),
        ):
            RemoteRetriever(url).search(QUESTION)

"""A server's search through the same method, and through every adapter, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax import Retriever
from qrag_jax.errors import InputError
from qrag_jax.integrations.remote import RemoteRetriever
from qrag_jax.integrations.searches import Searches
from qrag_jax.retrieval.multi_step import Hit
from tests.entry_points import Commands
from tests.integrations.asked import QUESTION, QUESTIONS
from tests.integrations.conftest import COUNT
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
        {"steps": 1},
        {"topk": 7},
        {"beam": 3},
        {"threshold": -math.inf},
        {"threshold": retriever.search(QUESTION)[1].score},
        {"where": {"page": 1}},
        {"where": {"page": {0, 2}}, "topk": 5},
    ):
        expected = retriever.search(QUESTIONS, **settings)  # type: ignore[arg-type]
        same(remote.search(QUESTIONS, **settings), expected)  # type: ignore[arg-type]
        same([remote.search(QUESTION, **settings)], expected[:1])  # type: ignore[arg-type]
    assert remote.search([]) == []
    many = [f"{question} {number}" for number in range(50) for question in QUESTIONS]
    same(remote.search(many), retriever.search(many))


def test_threads_and_copies(remote: RemoteRetriever) -> None:
    again = pickle.loads(pickle.dumps(copy.deepcopy(remote)))  # noqa: S301
    assert again == remote
    expected = remote.search(QUESTIONS)
    with ThreadPoolExecutor(8) as pool:
        same(list(pool.map(again.search, QUESTIONS * 10)), expected * 10)


def of_langchain(retriever: Searches) -> list[str | None]:
    pytest.importorskip("langchain_core", reason="needs the extra langchain")
    from qrag_jax.integrations.langchain import QRagRetriever

    return [each.id for each in QRagRetriever(retriever=retriever, k=5).invoke(QUESTION)]


def of_llamaindex(retriever: Searches) -> list[str]:
    pytest.importorskip("llama_index.core", reason="needs the extra llamaindex")
    from qrag_jax.integrations.llamaindex import QRagRetriever

    return [node.node_id for node in QRagRetriever(retriever, 5).retrieve(QUESTION)]


def of_haystack(retriever: Searches) -> list[str]:
    pytest.importorskip("haystack", reason="needs the extra haystack")
    from qrag_jax.integrations.haystack import QRagRetriever

    adapter = QRagRetriever.from_dict(QRagRetriever(retriever, 5).to_dict())
    return [each.id for each in adapter.run(QUESTION)["documents"]]


def of_dspy(retriever: Searches) -> list[str]:
    pytest.importorskip("dspy", reason="needs the extra dspy")
    from qrag_jax.integrations.dspy import QRagRetriever

    return QRagRetriever(retriever, 5)(QUESTION).ids


@pytest.mark.parametrize("found", [of_langchain, of_llamaindex, of_haystack, of_dspy])
def test_every_adapter_takes_a_server(
    found: Callable[[Searches], list[str]], remote: RemoteRetriever, retriever: Retriever
) -> None:
    assert found(remote) == [hit.id for hit in retriever.search(QUESTION, topk=5)]


def test_what_the_server_refuses_is_its_sentence(remote: RemoteRetriever) -> None:
    for settings, told in (
        ({"where": {"colour": 1}}, "'colour'"),
        ({"topk": COUNT + 1}, f"topk is {COUNT + 1}, and the corpus has {COUNT} passages"),
        ({"steps": 3}, "steps is 3"),
        ({"threshold": math.nan}, "input should"),
    ):
        with pytest.raises(InputError, match=told) as caught:
            remote.search(QUESTION, **settings)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{remote.url}: ")
    with pytest.raises(InputError, match="question is empty"):
        remote.search([QUESTION, " "])
    with pytest.raises(InputError, match=r"'127\.0\.0\.1:8000'"):
        RemoteRetriever("127.0.0.1:8000")
    with pytest.raises(InputError, match=r"\(a\.b\)") as refused:
        RemoteRetriever("http://me:secret@a.b:8000")
    assert "secret" not in str(refused.value)


def test_no_server_or_another_one_is_one_sentence() -> None:
    with socket.socket() as taken:  # it does not listen
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"{url} gives no answer of qrag serve \(Connection"):
            RemoteRetriever(url).search(QUESTION)


@pytest.mark.parametrize(
    ("status", "answer", "reason"),
    [
        (200, {"result": []}, "HTTP 200: .*result"),
        (200, {"hits": []}, "HTTP 200"),
        (200, {"hits": [[{"id": "p1"}]]}, "HTTP 200"),
        (200, ["hits"], "HTTP 200"),
        (404, {"detail": "Not Found"}, "HTTP 404: .*Not Found"),
    ],
)
def test_what_is_no_answer_of_a_search(status: int, answer: Any, reason: str) -> None:
    with (
        listening(lambda call: (status, answer)) as url,
        pytest.raises(InputError, match=rf"{url} gives no answer of qrag serve \({reason}"),
    ):
        RemoteRetriever(url).search(QUESTION)

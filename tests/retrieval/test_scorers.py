from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.retrieval.scorers import EmbeddingScorer, EndpointScorer, rerank_documents
from tests.llm.asking import eventually
from tests.llm.model_server import Call, ModelServer, Reply

TEXTS = ["red cat", "red red cat", "blue dog", "red dog", "green cow", "blue cat"]


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
def client(server: ModelServer) -> Iterator[Client]:
    settings: dict[str, Any] = {"attempts": 3, "attempt_timeout": 5.0, "deadline": 10.0}
    settings |= {"retry_pause": 0.01, "wait_limit": 0.3}
    with Client(ClientConfig(server.url, "tiny", **settings), log=lambda line: None) as made:
        yield made


def letters(texts: Sequence[str]) -> np.ndarray:
    """float32 `[texts, 26]`: how often each letter occurs."""
    return np.array([[text.count(chr(97 + i)) for i in range(26)] for text in texts], np.float32)


# ---------------------------------------------------------------- vectors


def test_each_text_is_embedded_once_and_vectors_are_checked() -> None:
    seen: list[Sequence[str]] = []

    def noted(texts: Sequence[str]) -> np.ndarray:
        seen.append(texts)
        return letters(texts)

    documents = [["b", "a"], [], ["a", "a", "c"]]
    found = rerank_documents(EmbeddingScorer(letters, noted), ["a", "b", "c"], documents, 2)
    assert seen == [["b", "a", "c"]]
    assert found.hits.numbers.tolist() == [[1, 0], [NONE, NONE], [2, 0]]
    assert not found.failed.any()
    none = rerank_documents(EmbeddingScorer(letters, letters), ["a"], [[]], 2)
    assert none.hits.numbers.tolist() == [[NONE, NONE]]
    with pytest.raises(ValueError, match="2 texts were"):
        EmbeddingScorer(letters, lambda texts: letters(texts)[0]).scores(["a"], [["b", "c"]])


def test_equal_texts_tie_wherever_they_stand() -> None:
    rng = np.random.default_rng(0)
    known = {text: rng.standard_normal(61).astype(np.float32) for text in "abcdq"}

    def drawn(texts: Sequence[str]) -> np.ndarray:
        return np.stack([known[text] for text in texts])

    documents = rng.choice(list("abcd"), 37).tolist()
    hits = rerank_documents(EmbeddingScorer(drawn, drawn), ["q"], [documents], 37).hits
    for letter in "abcd":
        places = [place for place in hits.numbers[0].tolist() if documents[place] == letter]
        assert places == sorted(places)
        assert np.unique(hits.scores[0][np.isin(hits.numbers[0], places)]).size == 1


def test_scores_that_are_not_finite_count_as_a_failure() -> None:
    def broken(texts: Sequence[str]) -> np.ndarray:
        return np.where(letters(texts) > 1, np.nan, letters(texts))

    documents = [["aa", "b"], ["a", "b"]]
    found = rerank_documents(EmbeddingScorer(letters, broken), ["b", "b"], documents, 2)
    assert found.failed.tolist() == [True, False]
    assert found.hits.numbers.tolist() == [[0, 1], [1, 0]]


# ---------------------------------------------------------------- a server


def test_a_server_orders_the_documents(server: ModelServer, client: Client) -> None:
    """The server sends the best first, so the scores have to find their passages again."""
    scorer = EndpointScorer(client, {"user": "me"})
    found = rerank_documents(scorer, ["cat dog blue", "none", "cow"], [TEXTS, [], TEXTS[4:]], 3)
    assert found.hits.numbers.tolist() == [[2, 5, 0], [NONE] * 3, [0, 1, NONE]]
    assert found.hits.scores[0].tolist() == [2.0, 2.0, 1.0]
    assert not found.failed.any()
    calls = {call.body["query"]: call for call in server.calls}
    assert calls.keys() == {"cat dog blue", "cow"}  # no request without documents
    assert calls["cow"].path == "/v1/rerank"
    body = {"model": "tiny", "query": "cow", "documents": TEXTS[4:], "user": "me"}
    assert calls["cow"].body == body


def test_a_failure_that_passes_is_tried_again(server: ModelServer, client: Client) -> None:
    server.script = lambda call: Reply(status=500) if call.nth == 0 else Reply()
    found = rerank_documents(EndpointScorer(client), ["a"], [["b", "a"]], 2)
    assert found.hits.numbers.tolist() == [[1, 0]]
    assert not found.failed.any()
    assert client.counters().retries == 1


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (Reply(status=500), "server"),
        (Reply(status=404), "request"),
        (Reply(status=400, text="longer than the maximum model length"), "too_long"),
        (Reply(raw="{}"), "malformed"),
        (Reply(raw="no JSON"), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0}]}'), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0},'
                   '{"index": 0, "relevance_score": 2.0}]}'), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0},'
                   '{"index": 2, "relevance_score": 2.0}]}'), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0},'
                   '{"index": 1, "relevance_score": NaN}]}'), "malformed"),
        (Reply(raw='{"results": [{"index": 0, "relevance_score": 1.0},'
                   '{"index": 1, "relevance_score": null}]}'), "malformed"),
        (Reply(raw='{"results": {"0": 1.0, "1": 2.0}}'), "malformed"),
        (Reply(drop=True), "connection"),
    ],
)  # fmt: skip
def test_a_failure_keeps_the_order_and_is_marked(
    reply: Reply, cause: str, server: ModelServer, client: Client
) -> None:
    def script(call: Call) -> Reply:
        return reply if call.prompt == "bad" else Reply()

    server.script = script
    found = rerank_documents(EndpointScorer(client), ["bad", "dog"], [TEXTS[3:5], TEXTS[1:3]], 2)
    assert found.failed.tolist() == [True, False]
    assert found.hits.numbers.tolist() == [[0, 1], [1, 0]]
    assert found.hits.scores.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert client.counters().failures[cause] == 1


def test_a_server_that_comes_back_scores_again(server: ModelServer, client: Client) -> None:
    server.kill()
    scorer = EndpointScorer(client)
    assert rerank_documents(scorer, ["blue", "cat"], [TEXTS, TEXTS], 3).failed.all()
    server.start()
    assert eventually(lambda: not rerank_documents(scorer, ["blue"], [TEXTS], 3).failed.any())


def test_a_failed_questions_documents_keep_their_order(server: ModelServer, client: Client) -> None:
    server.script = lambda call: Reply(status=404)
    found = rerank_documents(EndpointScorer(client), ["b", "c"], [["a", "b"], []], 3)
    assert found.hits.numbers.tolist() == [[0, 1, NONE], [NONE] * 3]
    assert found.hits.scores[0, :2].tolist() == [0.0, 0.0]
    assert found.failed.tolist() == [True, False]


def test_scores_are_cached_as_answers_are(server: ModelServer, tmp_path: Path) -> None:
    config = ClientConfig(server.url, "tiny", cache=str(tmp_path / "cache.sqlite"))
    for _ in range(2):
        with Client(config) as client:
            found = rerank_documents(EndpointScorer(client), ["b"], [["a", "b"]], 2)
            assert found.hits.numbers.tolist() == [[1, 0]]
    assert len(server.calls) == 1

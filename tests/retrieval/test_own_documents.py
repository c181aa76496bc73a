"""Retrievers over a question's own documents, by their definitions; models behind servers."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.own_documents import EmbeddingScorer, OwnRetriever, endpoint_scorer
from qrag_jax.retrieval.towers import EndpointTower
from tests.json_server import Call as HttpCall
from tests.json_server import listening
from tests.llm.model_server import ModelServer, Reply


class Doc(NamedTuple):
    id: str
    text: str
    is_supporting: bool = False


# The query's word stands in them 5, 4, 3, 2, 1 and 0 times, all of 6 words: BM25 ranks a b c d e.
WORDY = tuple(
    Doc(name, " ".join(["whale"] * count + ["ship"] * (6 - count)), name in "be")
    for name, count in zip("abcdef", (5, 4, 3, 2, 1, 0))
)
QUERY = "Whales?"


def scorer_of(order: str, calls: list[int] | None = None) -> Callable[..., list[Any]]:
    """Ranks the documents as their names stand in `order`; notes how many queries a call has."""
    scores = {each.text: -float(order.index(each.id)) for each in WORDY}

    def score(queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[Any]:
        if calls is not None:
            calls.append(len(queries))
        return [np.array([scores[text] for text in texts]) for texts in passages]

    return score


def found(
    retriever: OwnRetriever, *searches: tuple[str, int, tuple[Doc, ...]]
) -> list[str | Failure]:
    """The documents of each search, by their names."""
    replies = retriever.find(searches)
    return [x if isinstance(x, Failure) else "".join(doc.id for doc in x) for x in replies]


@pytest.mark.parametrize("name", ["bm25", "lexical"])
def test_words_rank_within_the_question(name: str) -> None:
    """Nothing is found where no word is; the rarer word of the question's documents counts for
    more."""
    colours = Doc("a", "red blue"), Doc("b", "red green"), Doc("c", "red blue")
    assert found(
        OwnRetriever(name),
        *((QUERY, 3, WORDY), (QUERY, 9, WORDY), (QUERY, 2, WORDY[3:]), ("stars", 2, WORDY)),
        *(("", 2, WORDY), (QUERY, 2, (Doc("x", "!"),)), (QUERY, 2, ()), ("red green", 1, colours)),
    ) == ["abc", "abcde", "de", "", "", "", "", "b"]


def test_semantic_is_the_scorers_order_and_golden_knows() -> None:
    calls: list[int] = []
    wanted = ("q", 2, WORDY), ("r", 9, WORDY[:3]), ("s", 2, ())
    assert found(OwnRetriever("semantic", scorer_of("fedcba", calls)), *wanted) == ["fe", "cba", ""]
    assert len(calls) == 1, "the pairs of all searches are one batch"
    assert found(OwnRetriever("golden"), ("anything", 1, WORDY), ("", 5, ())) == ["be", ""]


def test_vectors_of_documents_are_computed_once() -> None:
    batches: list[Sequence[str]] = []

    def embed(texts: Sequence[str]) -> np.ndarray:
        batches.append(texts)
        return np.array([[text.count("whale"), text.count("ship")] for text in texts], np.float32)

    scorer = EmbeddingScorer(embed, embed)
    for _ in range(2):
        assert found(OwnRetriever("semantic", scorer), ("ship", 2, WORDY)) == ["fe"]
    assert [[*batch] for batch in batches] == [[each.text for each in WORDY], ["ship"], ["ship"]]


def test_interleaved_by_hand() -> None:
    """After RLVR's rule: ⌊k/2⌋+1 semantic ones (f e d …), then as many by BM25 (a b c …); where
    both agree, the place becomes free for what BM25 has next."""
    for order, k, names in (
        *(("fedcba", 1, "f"), ("fedcba", 3, "fea"), ("fedcba", 4, "feda")),
        *(("fedcba", 6, "fedcab"), ("afedcb", 3, "afb")),
    ):
        assert found(OwnRetriever("interleaved", scorer_of(order)), (QUERY, k, WORDY)) == [names]


@pytest.mark.parametrize("name", ["semantic", "hybrid", "interleaved"])
def test_a_scorer_that_fails_is_a_failure(name: str) -> None:
    def scorer(queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[Any]:
        return [None, np.ones(len(passages[1])), np.array([math.nan] * len(passages[2]))]

    retriever = OwnRetriever(name, scorer)
    lost, good, bad = found(retriever, ("lost", 2, WORDY), ("q", 1, WORDY[1:]), ("q", 1, WORDY))
    assert isinstance(lost, Failure)
    assert good == "b"
    assert isinstance(bad, Failure), "a score that is not finite is none"
    assert OwnRetriever(name, scorer_of("abcdef")).find([]) == []
    with pytest.raises(InputError, match=name):
        OwnRetriever(name)  # without something that scores


# ---------------------------------------------------------------------- a server that scores

TEXTS = ["red cat", "red red cat", "blue dog", "red dog", "green cow", "blue cat"]


def test_a_server_orders_the_documents() -> None:
    """It sends the best first, so the scores have to find their documents again. A failure is no
    scores."""
    bad = {"fails": Reply(status=500)}
    for name, scores in (("short", [1.0]), ("none", [1.0, math.nan])):
        rows = [{"index": n, "relevance_score": score} for n, score in enumerate(scores)]
        bad[name] = Reply(raw=json.dumps({"results": rows}))
    queries = [*bad, "cat dog blue", "nothing", "cow"]
    documents = [*[TEXTS[3:5]] * 3, TEXTS, [], TEXTS[4:]]
    with ModelServer(lambda call: bad.get(call.prompt, Reply())) as server:
        config = ClientConfig(server.url, "tiny", attempts=3, retry_pause=0.01)
        with Client(config, log=lambda line: None) as client:
            *none, six, empty, two = endpoint_scorer(client)(queries, documents)
    assert none == [None, None, None]
    rows = [scores.tolist() for scores in (six, empty, two) if scores is not None]
    assert rows == [[1.0, 1.0, 2.0, 1.0, 0.0, 2.0], [], [1.0, 0.0]]
    calls = {call.body["query"]: call.body for call in server.calls}
    assert calls.keys() == {*bad, "cat dog blue", "cow"}  # no request without documents
    assert calls["cow"] == {"model": "tiny", "query": "cow", "documents": TEXTS[4:]}


# ---------------------------------------------------------------------- a server that embeds

WIDTH = 4
ROWS = [[2, 7 + n, 3] for n in range(3)]
Embed = Callable[[list[int]], list[float]]


def vector(row: list[int]) -> list[float]:
    return [float(row[1]), 1.0, 0.0, -2.0]


@contextlib.contextmanager
def tower_of(embed: Embed, scale: float) -> Iterator[EndpointTower]:
    def answer(call: HttpCall) -> tuple[int, Any]:
        rows = enumerate(json.loads(call.body)["input"])
        return 200, {"data": [{"index": i, "embedding": embed(row)} for i, row in rows]}

    with listening(answer) as url:
        config = ClientConfig(f"{url}/v1", "chunk", attempts=3, retry_pause=0.01, wait_limit=1.0)
        yield EndpointTower(config, WIDTH, scale)


def test_a_factor_that_the_server_skips_is_multiplied() -> None:
    for length in (1.0, 3.0):

        def embed(row: list[int], length: float = length) -> list[float]:
            whole = np.array(vector(row))
            return (length * whole / np.linalg.norm(whole)).tolist()

        with tower_of(embed, 3.0) as tower:
            np.testing.assert_allclose(np.linalg.norm(tower(ROWS), axis=1), 3.0, rtol=1e-6)


def test_vectors_that_cannot_be_the_towers_are_refused() -> None:
    """Of another length than its own, of another width, no numbers."""
    nans = [math.nan] * WIDTH
    for embed, scale in ((vector, 3.0), (lambda row: [1.0], 1.0), (lambda row: nans, 1.0)):
        with tower_of(embed, scale) as tower, pytest.raises(InputError, match="chunk"):
            tower(ROWS[:2])

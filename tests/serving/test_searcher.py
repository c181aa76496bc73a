"""Questions with settings of their own, searched together as if each were alone; the queue."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.index_folder import IndexAt
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.retrieval.vectors import FaissIndex
from qrag_jax.serving.searcher import Ask, Busy, Outcome, Searcher, Worker
from qrag_jax.systems.retriever import open_plain
from tests.retrieval.test_multi_step import CORPUS, GREEDY, search_of, towers_of
from tests.retrieval.test_multi_step import QUESTIONS as ALL
from tests.serving.served import WORDS, words_index

_LONG = towers_of(0).cut(ALL)
QUESTIONS = [question for place, question in enumerate(ALL) if place not in _LONG]


@pytest.fixture(scope="module", params=["words", "trained"])
def searcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    if request.param == "trained":
        return Searcher(search_of(CORPUS, GREEDY))
    corpus = words_index(tmp_path_factory.mktemp("words"))
    return Searcher(SingleStepSearch(BM25Index.build(corpus)))


# With the number of passages: of words (`test_serve.py` says which), and of a trained retriever
# (`integrations/test_adapters.py`).
ACCEPTED = (
    [
        (Ask("about cats"), 3),
        (Ask("about cats", count=9), 9),
        (Ask("about cats", where={"page": 1}), 3),
        (Ask("about dogs", count=1), 1),
        (Ask("about cats", threshold=0.5), 1),
        (Ask("about cats", where={"page": [0, 1]}, count=2), 2),
    ],
    [
        (Ask(QUESTIONS[0]), 3),
        (Ask(QUESTIONS[0], steps=2), 2),
        (Ask(QUESTIONS[0], count=7), 7),
        (Ask(QUESTIONS[0], threshold=math.inf), 0),
        (Ask(QUESTIONS[0], where={"even": True}), 3),
        (Ask(QUESTIONS[0], beam=3), 3),
    ],
)
REFUSED = (
    [
        (Ask(" \n"), "question"),
        (Ask("cats \ud800"), "surrogate"),
        (Ask("cats", count=11), "topk"),
        (Ask("cats", steps=2), "steps"),
        (Ask("cats", beam=4), "beam"),
        (Ask("cats", where={"pag": 1}), "'pag'"),
    ],
    [
        (Ask("who", steps=4), "steps"),
        (Ask("who", beam=65), "beam"),
        (Ask("word " * 500), "longer"),
        (Ask("who", where={"odd": True}), "odd"),
    ],
)


def test_each_question_is_answered_or_refused_as_if_it_were_alone(searcher: Searcher) -> None:
    accepted, refused = (of[searcher.most_steps > 1] for of in (ACCEPTED, REFUSED))
    mixed = [*refused[:2], *accepted, *refused[2:]]
    outcomes = dict(zip([id(ask) for ask, _ in mixed], searcher.search([a for a, _ in mixed])))
    for ask, name in refused:
        assert name in str(outcomes[id(ask)])
    for ask, count in accepted:
        hits, alone = outcomes[id(ask)], searcher.search([ask])[0]
        assert isinstance(hits, list), hits
        assert isinstance(alone, list)
        assert len(hits) == count
        assert [hit._replace(score=0) for hit in hits] == [hit._replace(score=0) for hit in alone]
        scores = ([hit.score for hit in some] for some in (hits, alone))
        np.testing.assert_allclose(*scores, atol=2e-5)


def test_an_engine_s_own_refusal_is_no_fault_of_the_question(tmp_path: Path) -> None:
    """Without vectors an engine refuses every query: the server is set up wrongly."""
    corpus = words_index(tmp_path)
    index = FaissIndex(corpus, np.eye(len(corpus), 4, dtype=np.float32))
    with pytest.raises(ValueError, match="vectors"):
        Searcher(SingleStepSearch(index)).search([Ask("cats")])


# ---------------------------------------------------------------------- the queue

LIMIT = 30  # seconds


class Held(Searcher):
    """A searcher that waits before each search, once it is told to, and notes what is asked."""

    def __init__(self, corpus: StoredCorpus) -> None:
        super().__init__(SingleStepSearch(BM25Index.build(corpus)))
        self.go, self.begun = threading.Event(), threading.Event()
        self.asked: list[list[str]] = []
        self.go.set()

    def search(self, asks: Sequence[Ask]) -> list[Outcome]:
        self.asked.append([ask.question for ask in asks])
        self.begun.set()
        assert self.go.wait(LIMIT)
        return super().search(asks)


Opened = Callable[..., tuple[Worker, Held]]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens a worker over an index of words in the test's folder."""
    held = Held(words_index(tmp_path))
    workers = []

    def start(**config: float) -> tuple[Worker, Held]:
        workers.append(Worker(lambda: held, **config))  # type: ignore[arg-type]
        workers[0].start()
        assert workers[0].await_loaded(LIMIT)
        # All sizes that programs are compiled for are searched before the first question.
        assert len(held.asked[-1]) == workers[0].max_batch
        held.asked.clear()
        return workers[0], held

    yield start
    held.go.set()
    assert all(worker.close(LIMIT) for worker in workers)


def block(worker: Worker, held: Held) -> Future:
    """Lets a search begin and not end."""
    held.go.clear()
    held.begun.clear()
    (future,) = worker.submit([Ask("cats")])
    assert held.begun.wait(LIMIT)
    return future


def test_what_waits_is_searched_together_up_to_the_largest_batch(opened: Opened) -> None:
    worker, held = opened(max_batch=4, max_wait=0)
    first = block(worker, held)
    later = [worker.submit([Ask(word)])[0] for word in WORDS]
    assert len(worker) == len(WORDS)
    held.go.set()
    assert [future.result(LIMIT)[0].title for future in later] == [w.title() for w in WORDS]
    assert first.result(LIMIT)[0].id == "p0"
    assert held.asked == [["cats"], WORDS[:4], WORDS[4:8], WORDS[8:]]


def test_a_full_queue_takes_nothing_of_a_request(opened: Opened) -> None:
    """What is cancelled makes room, and is not searched."""
    worker, held = opened(max_queue=3, max_batch=8, max_wait=0)
    block(worker, held)
    kept = worker.submit([Ask("cats"), Ask("dogs")])
    with pytest.raises(Busy, match="2"):
        worker.submit([Ask("birds"), Ask("trees")])
    gone = worker.submit([Ask("stars")])
    with pytest.raises(Busy):
        worker.submit([Ask("ships")])
    assert gone[0].cancel()
    last = worker.submit([Ask("lamps")])
    held.go.set()
    assert [future.result(LIMIT)[0].title for future in kept + last] == ["Cats", "Dogs", "Lamps"]
    assert held.asked == [["cats"], ["cats", "dogs", "lamps"]]


def test_nothing_is_taken_before_the_index_is_loaded(tmp_path: Path) -> None:
    """Nor if it cannot be; which says why."""
    go = threading.Event()

    def opener() -> Searcher:
        assert go.wait(LIMIT)
        return Searcher(open_plain(IndexAt(tmp_path)))

    worker = Worker(opener)
    worker.start()
    with pytest.raises(Busy, match="loading"):
        worker.submit([Ask("cats")])
    go.set()
    assert worker.await_loaded(LIMIT)
    assert str(tmp_path) in str(worker.error)
    with pytest.raises(Busy, match="failed"):
        worker.submit([Ask("cats")])
    assert worker.close(LIMIT)

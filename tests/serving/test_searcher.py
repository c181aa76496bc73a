"""Questions with settings of their own, searched together as if each were alone; the queue."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.faiss_index import FaissIndex
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.serving.searcher import Ask, Busy, Outcome, Searcher, Worker
from tests.retrieval.test_multi_step import CORPUS, GREEDY, same, search_of, towers_of
from tests.retrieval.test_multi_step import QUESTIONS as ALL
from tests.serving.served import WORDS, words_index

_LONG = towers_of(0).cut(ALL)
QUESTIONS = [question for place, question in enumerate(ALL) if place not in _LONG]


# With the number of passages; which these are is in `integrations/test_adapters.py`.
ACCEPTED = (
    (Ask(QUESTIONS[0]), 3),
    (Ask(QUESTIONS[0], steps=2), 2),
    (Ask(QUESTIONS[0], count=7), 7),
    (Ask(QUESTIONS[0], threshold=math.inf), 0),
    (Ask(QUESTIONS[0], where={"even": True}), 3),
    (Ask(QUESTIONS[0], beam=3), 3),
)
REFUSED = (
    (Ask("who \ud800"), "surrogate"),
    (Ask("who", steps=4), "steps"),
    (Ask("who", beam=65), "beam"),
    (Ask("word " * 500), "longer"),
    (Ask("who", where={"odd": True}), "odd"),
)


def test_each_question_is_answered_or_refused_as_if_it_were_alone() -> None:
    searcher = Searcher(search_of(CORPUS, GREEDY))
    mixed = [*REFUSED[:2], *ACCEPTED, *REFUSED[2:]]
    outcomes = dict(zip([id(ask) for ask, _ in mixed], searcher.search([a for a, _ in mixed])))
    for ask, name in REFUSED:
        assert name in str(outcomes[id(ask)])
    for ask, count in ACCEPTED:
        hits, alone = outcomes[id(ask)], searcher.search([ask])[0]
        assert isinstance(hits, list), hits
        assert isinstance(alone, list)
        assert len(hits) == count
        same([hits], [alone])


def test_an_engine_s_own_refusal_is_no_fault_of_the_question(tmp_path: Path) -> None:
    """Without vectors an engine refuses every query: the server is set up wrongly."""
    corpus = words_index(tmp_path)
    index = FaissIndex.build(corpus, np.eye(len(corpus), 4, dtype=np.float32))
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


@contextlib.contextmanager
def blocked(folder: Path, **config: float) -> Iterator[tuple[Worker, Held, Future]]:
    """A worker over an index of words, whose first search has begun and does not end."""
    held = Held(words_index(folder))
    worker = Worker(lambda: held, **config)  # type: ignore[arg-type]
    worker.start()
    worker.loaded.result(LIMIT)
    # All sizes that programs are compiled for are searched before the first question.
    assert len(held.asked[-1]) == worker.max_batch
    held.asked.clear()
    held.go.clear()
    held.begun.clear()
    (first,) = worker.submit([Ask("cats")])
    assert held.begun.wait(LIMIT)
    try:
        yield worker, held, first
    finally:
        held.go.set()
        assert worker.close(LIMIT)


def test_what_waits_is_searched_together_up_to_the_largest_batch(tmp_path: Path) -> None:
    with blocked(tmp_path, max_batch=4, max_wait=0) as (worker, held, first):
        later = [worker.submit([Ask(word)])[0] for word in WORDS]
        assert len(worker) == len(WORDS)
        held.go.set()
        assert [future.result(LIMIT)[0].title for future in later] == [w.title() for w in WORDS]
        assert first.result(LIMIT)[0].id == "p0"
    assert held.asked == [["cats"], WORDS[:4], WORDS[4:8], WORDS[8:]]


def test_a_full_queue_takes_nothing_of_a_request(tmp_path: Path) -> None:
    """What is cancelled makes room, and is not searched."""
    with blocked(tmp_path, max_queue=3, max_batch=8, max_wait=0) as (worker, held, _):
        kept = worker.submit([Ask("cats"), Ask("dogs")])
        with pytest.raises(Busy, match="2"):
            worker.submit([Ask("birds"), Ask("trees")])
        (gone,) = worker.submit([Ask("stars")])
        assert gone.cancel()
        kept += worker.submit([Ask("lamps")])
        held.go.set()
        assert [future.result(LIMIT)[0].title for future in kept] == ["Cats", "Dogs", "Lamps"]
    assert held.asked == [["cats"], ["cats", "dogs", "lamps"]]

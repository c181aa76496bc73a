"""The queue: what is searched together, what is refused, and what a fault leaves unharmed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.index_folder import IndexAt
from qrag_jax.serving.searcher import (
    Ask,
    Busy,
    Outcome,
    Searcher,
    SearchFailed,
    SingleStep,
    Worker,
    WorkerConfig,
)
from qrag_jax.systems.retriever import open_plain
from tests.serving.small_index import WORDS, damage, words_index

LIMIT = 30  # seconds


class Held(SingleStep):
    """A searcher that waits before each search, once it is told to, and notes what is asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(open_plain(IndexAt(folder)))
        self.go, self.begun = threading.Event(), threading.Event()
        self.asked: list[list[str]] = []
        self.go.set()

    def search(self, asks: Sequence[Ask]) -> list[Outcome]:
        self.asked.append([ask.question for ask in asks])
        self.begun.set()
        assert self.go.wait(LIMIT)
        return super().search(asks)


Made = Callable[..., tuple[Worker, Held]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    workers = []

    def make(**config: float) -> tuple[Worker, Held]:
        words_index(tmp_path)
        held = Held(tmp_path)
        worker = Worker(lambda: held, WorkerConfig(**config))  # type: ignore[arg-type]
        worker.start()
        assert worker.await_loaded(LIMIT)
        # All sizes that programs are compiled for are searched before the first question.
        assert len(held.asked[-1]) == worker.config.max_batch
        held.asked.clear()
        workers.append((worker, held))
        return worker, held

    yield make
    for worker, held in workers:
        held.go.set()
        assert worker.close(LIMIT)


def block(worker: Worker, held: Held) -> Future:
    """Lets a search begin and not end."""
    held.go.clear()
    held.begun.clear()
    (future,) = worker.submit([Ask("cats")])
    assert held.begun.wait(LIMIT)
    return future


def test_what_waits_is_searched_together_up_to_the_largest_batch(made: Made) -> None:
    worker, held = made(max_batch=4, max_wait=0)
    first = block(worker, held)
    later = [worker.submit([Ask(word)])[0] for word in WORDS]
    assert len(worker) == len(WORDS)
    held.go.set()
    assert [future.result(LIMIT)[0].title for future in later] == [w.title() for w in WORDS]
    assert first.result(LIMIT)[0].id == "p0"
    assert held.asked == [["cats"], WORDS[:4], WORDS[4:8], WORDS[8:]]


def test_a_full_queue_takes_nothing_of_a_request(made: Made) -> None:
    """What is cancelled makes room, and is not searched."""
    worker, held = made(max_queue=3, max_batch=8, max_wait=0)
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


def test_a_fault_harms_only_the_question_that_meets_it(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, held = made(max_wait=0)
    damage(tmp_path, "birds")
    block(worker, held)
    futures = worker.submit([Ask("cats"), Ask("birds"), Ask(" "), Ask("dogs")])
    held.go.set()
    with caplog.at_level(logging.INFO):
        assert [futures[n].result(LIMIT)[0].title for n in (0, 3)] == ["Cats", "Dogs"]
        for number, kind in ((1, SearchFailed), (2, InputError)):
            with pytest.raises(kind):
                futures[number].result(LIMIT)
    (record,) = caplog.records
    told = record.getMessage()
    assert ", line" in told
    assert "birds" not in told.lower()  # a traceback, and no question
    assert worker.submit([Ask("dogs")])[0].result(LIMIT)[0].title == "Dogs"


def test_what_waits_is_answered_when_the_worker_closes(made: Made) -> None:
    worker, _ = made(max_batch=2, max_wait=60)
    waiting = [worker.submit([Ask(word)])[0] for word in WORDS[:3]]
    closing = threading.Thread(target=worker.close)
    closing.start()
    titles = [future.result(LIMIT)[0].title for future in waiting]
    assert titles == [word.title() for word in WORDS[:3]]
    closing.join(LIMIT)
    assert worker.close(LIMIT)
    with pytest.raises(Busy, match="stopping"):
        worker.submit([Ask("cats")])


def test_nothing_is_taken_before_the_index_is_loaded(tmp_path: Path) -> None:
    """Nor if it cannot be; which says why."""
    go = threading.Event()

    def opener() -> Searcher:
        assert go.wait(LIMIT)
        return SingleStep(open_plain(IndexAt(tmp_path)))

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

"""What a server asks and what answers it: an engine in one step, or a trained retriever in several.

A server gets single questions, each with its own settings, and hands on many at a time. A searcher
puts those together that can be searched together, and refuses one without touching the others. One
thread owns the search; questions of all clients wait in one queue. It is bounded: what does not fit
is refused at once, so that a client knows to come back.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import well_formed
from qrag_jax.retrieval.multi_step import Hit, MultiStepSearch, Rules, SingleStepSearch
from qrag_jax.retrieval.protocol import Where

# So that one question does not take the device from all others.
LARGEST_BEAM, LARGEST_COUNT = 64, 1000
USUAL_COUNT = 3  # passages, where nobody says how many
_LEAST_ASKED = 8
LOADING, READY, STOPPING, FAILED = "loading", "ready", "stopping", "failed"
_LOOK_EVERY = 1.0  # seconds, for another version of the index
LOG = logging.getLogger(__name__)
FAILED_SEARCH = "the search failed; the server's log says where."
_WARM = "warm up"  # a question
# A longer question: these have a program of their own.
_WARM_LONG = " ".join([_WARM] * 50)


@dataclasses.dataclass(frozen=True)
class Ask:
    """One question to a server; what is None is as the searcher has it."""

    question: str  # its text
    count: int | None = None  # most passages
    steps: int | None = None  # most steps
    beam: int | None = None  # paths that are searched side by side
    threshold: float | None = None  # only passages of higher scores are taken
    where: Where | None = None  # only passages whose metadata agree are taken


Outcome = list[Hit] | InputError


class Searcher:
    """Answers questions over one corpus; only one thread uses it.

    It searches at once for what can be searched for at once, and refuses a question by itself. A
    question's own beam and threshold go before those of a trained retriever.
    """

    def __init__(self, search: SingleStepSearch | MultiStepSearch) -> None:
        self.corpus, self._search = search.index.corpus, search
        self.most_steps = 1  # that a question may ask for
        if isinstance(search, MultiStepSearch):
            self.most_steps = search.rules.search.max_steps

    def search(self, asks: Sequence[Ask]) -> list[Outcome]:
        """For each question its passages in the order found, or why it is refused.

        Where it raises, the search failed, and the questions are not to blame.
        """
        outcomes: dict[int, Outcome] = {}
        groups: dict[Any, list[int]] = collections.defaultdict(list)
        too_long = set(self._search.cut([well_formed(ask.question) for ask in asks]))
        for place, ask in enumerate(asks):
            try:
                self._check(ask)
                if place in too_long:
                    raise InputError("the question is longer than the encoder reads; shorten it.")
                where = json.dumps(ask.where, sort_keys=True) if ask.where else ""
                groups[where, self._key(ask)].append(place)
            except InputError as error:
                outcomes[place] = error
        for (_, key), places in groups.items():
            group = [asks[place] for place in places]
            try:
                if group[0].where:
                    self.corpus.matching(group[0].where)
            except InputError as error:  # what the engine itself refuses is a fault of the server
                outcomes |= dict.fromkeys(places, error)
            else:
                outcomes |= zip(places, self._found(group, key), strict=True)
        return [outcomes[place] for place in range(len(asks))]

    def _check(self, ask: Ask) -> None:
        """Refuses a question that cannot be answered, with an `InputError`."""
        if not ask.question.strip():
            raise InputError("the question is empty; ask something.")
        if well_formed(ask.question) != ask.question:
            raise InputError("the question holds half of a surrogate pair; send whole characters.")
        for name, value, most in (
            ("topk", ask.count, min(len(self.corpus), LARGEST_COUNT)),
            ("steps", ask.steps, self.most_steps),
            ("beam", ask.beam, LARGEST_BEAM if self.most_steps > 1 else 1),
        ):
            if value is not None and not 1 <= value <= most:
                raise InputError(f"{name} is {value}; this server takes 1 to {most}.")
        if isinstance(self._search, SingleStepSearch):
            self._search.check(ask.question)

    def _key(self, ask: Ask) -> Rules | int:
        """Equal for questions that can be searched for at once, if their filters are."""
        if isinstance(self._search, MultiStepSearch):
            topk = ask.count if ask.steps is None else None
            return self._search.rules.changed(topk=topk, beam=ask.beam, threshold=ask.threshold)
        # The passages that the engine is asked for: some compile a program for each number.
        wanted = max(ask.count or USUAL_COUNT, _LEAST_ASKED)
        return min(1 << (wanted - 1).bit_length(), len(self.corpus))

    def _found(self, asks: Sequence[Ask], key: Any) -> Sequence[list[Hit]]:
        """The passages of questions of one key and one filter."""
        questions, where = [ask.question for ask in asks], asks[0].where
        if isinstance(self._search, MultiStepSearch):
            steps = [key.steps_for(x.count) if x.steps is None else x.steps for x in asks]
            results = self._search.with_rules(key).search(questions, steps, where)
            return [hits[: ask.count] for ask, hits in zip(asks, results, strict=True)]
        results = self._search.search(questions, key, where)
        best = []
        for ask, hits in zip(asks, results, strict=True):
            above = [h for h in hits if ask.threshold is None or h.score > ask.threshold]
            best.append(above[: ask.count or USUAL_COUNT])
        return best


# ---------------------------------------------------------------- the queue


class Busy(Exception):
    """The question cannot be taken now; the message says why, in one sentence."""


class SearchFailed(Exception):
    """A search failed inside; the log says where."""


class _Waiting(NamedTuple):
    ask: Ask
    future: Future[list[Hit]]
    since: float  # time.monotonic()


class Worker:
    """Searches in a thread of its own, from the loading of the index to the last question.

    `loaded` has the searcher, which `opener` makes in that thread, or why it cannot be made. When
    `version` gives another value, a second thread opens the index again, and the next search is of
    the new one. If it cannot be opened, the log says why, and the old one is searched on.
    """

    def __init__(
        self,
        opener: Callable[[], Searcher],
        *,
        max_batch: int = 64,  # most questions of one search
        max_wait: float = 0.002,  # seconds that the first question of a search waits for others
        max_queue: int = 1024,  # most questions that wait
        version: Callable[[], object] = lambda: None,
    ) -> None:
        self._opener, self._version = opener, version
        self.on_batch: Callable[[int], None] = lambda size: None  # is called with its questions
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.state = LOADING
        self.loaded: Future[Searcher] = Future()
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="search", daemon=True)
        self._ending = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="follow", daemon=True)
        self._seen: object = None  # the version that was opened last

    def __len__(self) -> int:
        return len(self._queue)

    def start(self) -> None:
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """Why there is no searcher; None: it is there, or not yet."""
        return self.loaded.exception() if self.loaded.done() else None

    def submit(self, asks: Sequence[Ask]) -> list[Future[list[Hit]]]:
        """Lets questions wait for their answers: all of them, or none.

        A future that is cancelled before its search begins costs no search. Futures raise
        `InputError` where the question is refused, and `SearchFailed` where the search failed. This
        raises `Busy` if the index is not loaded, the queue is full or the server stops.
        """
        with self._changed:
            if self.state != READY:
                raise Busy(f"the server is {self.state}; ask again later.")
            if len(self._queue) + len(asks) > self.max_queue:
                kept = [waiting for waiting in self._queue if not waiting.future.cancelled()]
                self._queue = collections.deque(kept)
            if len(self._queue) + len(asks) > self.max_queue:
                raise Busy(f"{len(self._queue)} questions wait already; ask again later.")
            now = time.monotonic()
            new = [_Waiting(ask, Future(), now) for ask in asks]
            self._queue.extend(new)
            self._changed.notify()
        return [waiting.future for waiting in new]

    def stop(self) -> None:
        """Takes no more questions, and searches for those that wait without waiting for others."""
        with self._changed:
            if self.state in (LOADING, READY):
                self.state = STOPPING
            self._changed.notify()
        self._ending.set()

    def close(self, timeout: float | None = None) -> bool:
        """Stops, and waits until all is answered and the thread ends; whether it did so in time."""
        self.stop()
        for thread in (self._thread, self._follower):
            if thread.ident is not None:  # it was started
                thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            searcher = self._opened()
        except Exception as error:
            self.state = FAILED
            self.loaded.set_exception(error)
            return
        with self._changed:
            if self.state == LOADING:
                self.state = READY
        self.loaded.set_result(searcher)
        self._follower.start()
        while batch := self._next():
            self.on_batch(len(batch))
            self._answer(batch)

    def _follow(self) -> None:
        """Opens what replaces the index, next to the old one, until the server stops."""
        while not self._ending.wait(_LOOK_EVERY):
            try:
                if self._version() != self._seen:
                    renewed = Future[Searcher]()
                    renewed.set_result(self._opened())
                    self.loaded = renewed
            except InputError as error:
                LOG.error("the index has changed, but the old one is searched on: %s", error)
            except Exception as error:
                log_fault(error, "opening the changed index")

    def _opened(self) -> Searcher:
        """The searcher of this version, which has searched in all sizes of programs.

        So no client waits for a compilation.
        """
        # Read before it is opened: at worst it is opened twice. What fails is not tried again.
        self._seen = self._version()
        searcher = self._opener()
        searcher.search([Ask(_WARM_LONG)])  # it is refused where questions are short
        size = 1
        while True:
            searcher.search([Ask(_WARM)] * size)
            if size >= self.max_batch or self.state not in (LOADING, READY):
                return searcher
            size = min(max(8, 2 * size), self.max_batch)

    def _next(self) -> list[_Waiting]:
        """The questions of the next search; none: the thread ends."""
        most, wait = self.max_batch, self.max_wait
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self.state == STOPPING)
                if not self._queue:
                    return []
                left = self._queue[0].since + wait - time.monotonic()
                self._changed.wait_for(lambda: len(self) >= most or self.state != READY, left)
                taken = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
            if batch := [one for one in taken if one.future.set_running_or_notify_cancel()]:
                return batch

    def _answer(self, batch: Sequence[_Waiting]) -> None:
        try:
            outcomes = self.loaded.result().search([waiting.ask for waiting in batch])
        except Exception as error:
            if len(batch) > 1:  # one of them may be the reason
                for waiting in batch:
                    self._answer([waiting])
            else:
                log_fault(error, "a search")
                batch[0].future.set_exception(SearchFailed(FAILED_SEARCH))
            return
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, InputError):
                waiting.future.set_exception(outcome)
            else:
                waiting.future.set_result(outcome)


def log_fault(error: Exception, what: str) -> None:
    """Logs where something failed; the error's own words may hold a question: at DEBUG only."""
    where = "".join(traceback.format_tb(error.__traceback__))
    LOG.error("%s failed with %s:\n%s", what, type(error).__name__, where)
    LOG.debug("%s", error)

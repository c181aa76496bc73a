"""Sends requests on one event loop; each request ends in an answer or a failure."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import openai

from qrag_jax.llm.client.cache import AnswerCache
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.client.connections import Connections, TooLarge
from qrag_jax.llm.client.counters import Counters
from qrag_jax.llm.client.replies import read_error, read_outcome, retry_after, shorten
from qrag_jax.llm.listener import OwnServer
from qrag_jax.llm.outcomes import (
    READ,
    UNMARKED,
    UNREAD,
    Answer,
    Failure,
    Outcome,
    Request,
    Sampling,
    how_read,
    request_key,
)
from qrag_jax.llm.server_url import BLOTTED, without_key

_LONGEST_RETRY_PAUSE = 8.0
_FLUSH_SECONDS = 0.2  # between writes; a crash may lose the answers of this time
_SETTLE_SECONDS = 1.0  # that answers wait to be written before they are returned
_REQUESTS_AT_A_TIME = 500  # looked up before other tasks of the loop get a turn

# Causes that may pass, so that the same request is sent again. "filtered" and "tool_call" are not
# among them: they would happen again.
_PASSING = (
    *("timeout", "connection", "server", "rate_limit", "broken_off"),
    *("malformed", "empty", "unknown_end"),
)
_BAD_ANSWERS = ("malformed", "empty", "unknown_end")

_HOW_READ = {UNREAD: "not readable", UNMARKED: 'without "Final answer:"'}

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Served:
    """The model that requests ask for, and the version of its weights."""

    model: str
    version: str


@dataclasses.dataclass
class _Attempt:
    """How one attempt ended.

    Attributes:
        outcome: the answer or the failure.
        pause: seconds that the server asks to wait.
        refused: whether there was no connection at all.
    """

    outcome: Outcome
    pause: float = 0.0
    refused: bool = False


class _Outage:
    """The time in which there is no connection to the server."""

    def __init__(self, now: float) -> None:
        self.began = self.counted = now
        self.logged = -math.inf
        self.over = asyncio.Event()


class Asker:
    """Asks a server; all methods must run on one event loop.

    Attributes:
        served: the model that requests ask for.
        counters: what has happened so far.
    """

    def __init__(
        self,
        config: ClientConfig,
        cache: AnswerCache | None,
        log: Callable[[str], None],
        own: OwnServer | None = None,
    ) -> None:
        self.served = Served(config.model, config.version)
        self.counters = Counters()
        self._config, self._cache, self._log = config, cache, log
        # The cache may wait for the disk and for other processes, so it does not run on the loop.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="llm-cache")
        self._key, self._own, self._url = config.api_key(), own, config.url
        self._connections = Connections(config, self._key, own)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._outage: _Outage | None = None
        self._in_flight: dict[bytes, asyncio.Future[Outcome | None]] = {}
        self._flusher: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Future[None] | None = None
        self._random = random.Random()
        self._shown: set[str] = set()  # kinds of replies, not read well, that the user was shown

    async def ask(self, requests: Sequence[Request]) -> list[Outcome]:
        """Asks all requests and waits; returns their outcomes in the same order."""
        served = self.served
        outcomes: list[Outcome | None] = [None] * len(requests)
        keys = await self._look_up(requests, outcomes, served)
        left = iter([index for index, outcome in enumerate(outcomes) if outcome is None])
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._config.concurrency, len(requests))):
                    group.create_task(self._work(requests, keys, left, outcomes, served))
        except ExceptionGroup as errors:  # a mistake in the program: raise the first
            raise errors.exceptions[0] from None
        if any(key is not None for key in keys):
            await self._settle()
        complete = [outcome for outcome in outcomes if outcome is not None]
        assert len(complete) == len(requests)
        self._count_reading(requests, complete)
        return complete

    async def close(self) -> None:
        """Writes pending answers to the cache and closes the connections."""
        if self._flusher is not None:
            self._flusher.cancel()
        if self._cache is not None:
            await self._on_disk(self._cache.close)
        self._disk.shutdown(wait=False)
        await self._connections.close()

    def _count_reading(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Counts how the answers were read; shows the first of each kind that was not read well."""
        how = [how_read(*each) for each in zip(requests, outcomes, strict=True)]
        self.counters.read(how)
        for kind in {*how} - {READ} - self._shown:
            self._shown.add(kind)
            outcome = outcomes[how.index(kind)]
            assert isinstance(outcome, Answer)
            kept = f"not kept in {self._config.cache}" if kind == UNREAD else "its last line counts"
            cached = f"; {kept}" if self._config.cache or kind != UNREAD else ""
            self._log(
                f"a reply of {self.served.model} is {_HOW_READ[kind]}: {shorten(outcome.text)!r} "
                f"(llm/{kind} counts them{cached})"
            )

    # ------------------------------------------------------------------ requests of one `ask`

    async def _look_up(
        self, requests: Sequence[Request], outcomes: list[Outcome | None], served: Served
    ) -> list[bytes | None]:
        """Returns the keys, None if not greedy; fills in the outcomes that the cache has."""
        keys: list[bytes | None] = []
        for start in range(0, len(requests), _REQUESTS_AT_A_TIME):
            part = [
                request_key(request, served.model, served.version) if request.greedy else None
                for request in requests[start : start + _REQUESTS_AT_A_TIME]
            ]
            keys += part
            wanted = list({key for key in part if key is not None})
            if self._cache is not None and wanted:
                known = await self._on_disk(functools.partial(self._cache.get, wanted))
                self.counters.skipped(self._cache.skipped)
                for index, key in enumerate(part, start):
                    cached = known.get(key) if key is not None else None
                    if how_read(requests[index], cached) != UNREAD:
                        outcomes[index] = cached
            await asyncio.sleep(0)
        self.counters.found(sum(outcome is not None for outcome in outcomes))
        return keys

    async def _work(
        self,
        requests: Sequence[Request],
        keys: Sequence[bytes | None],
        left: Iterator[int],
        outcomes: list[Outcome | None],
        served: Served,
    ) -> None:
        """Takes requests from `left`, which all workers share, until it is empty."""
        for index in left:
            key = keys[index]
            if key is None:
                outcomes[index] = await self._call(requests[index])
            else:
                outcomes[index] = await self._call_once(requests[index], key, served)

    async def _call_once(self, request: Request, key: bytes, served: Served) -> Outcome:
        """Waits for an identical request in flight, or else asks and shares the outcome."""
        while (joined := self._in_flight.get(key)) is not None:
            if (outcome := await asyncio.shield(joined)) is not None:
                self.counters.joined(outcome)
                return outcome
            # That request was cancelled together with its `ask`, so this one may ask now.
        self._in_flight[key] = own = asyncio.get_running_loop().create_future()
        outcome = None
        try:
            outcome = await self._call(request)
        finally:
            del self._in_flight[key]
            own.set_result(outcome)
        if (
            self._cache is not None
            and isinstance(outcome, Answer)
            and how_read(request, outcome) != UNREAD
        ):
            self._keep(key, outcome)
        return outcome

    def _keep(self, key: bytes, answer: Answer) -> None:
        assert self._cache is not None
        self._cache.put(key, answer)
        if self._cache.pending >= _REQUESTS_AT_A_TIME:
            self._flush()
        elif self._flusher is None:
            loop = asyncio.get_running_loop()
            self._flusher = loop.call_later(_FLUSH_SECONDS, self._flush)

    def _flush(self) -> asyncio.Future[None] | None:
        """Starts to write the pending answers, unless a write is already running."""
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        if self._cache is not None and (self._flushing is None or self._flushing.done()):
            self._flushing = self._on_disk(self._cache.flush)
        return self._flushing

    async def _settle(self) -> None:
        """Waits until the answers are on disk, but not long if another process holds the file."""
        clock = asyncio.get_running_loop().time
        ends = clock() + _SETTLE_SECONDS
        for _ in range(2):  # a running write may have begun before the last answers came
            if self._cache is None or not self._cache.pending:
                return
            if (flushing := self._flush()) is not None:
                await asyncio.wait([flushing], timeout=max(ends - clock(), 0.0))

    def _on_disk(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._disk, work)

    # ------------------------------------------------------------------ one request

    async def _call(self, request: Request) -> Outcome:
        """Tries until there is an answer, a final failure, or no attempts or time are left."""
        async with self._slots:
            outcome, seconds, attempts = await self._attempts(request)
        if isinstance(outcome, Failure):
            outcome = dataclasses.replace(outcome, attempts=attempts)
        self.counters.called(outcome, seconds, attempts)
        return outcome

    async def _attempts(self, request: Request) -> tuple[Outcome, float, int]:
        """Returns the outcome, the seconds used of the deadline, and the attempts that count."""
        config, clock = self._config, asyncio.get_running_loop().time
        seconds, attempts, bad, refusals = 0.0, 0, 0, 0
        while True:
            began = clock()
            limit = min(config.attempt_timeout, config.deadline - seconds)
            attempt = await self._attempt(request, limit)
            outcome = attempt.outcome
            if attempt.refused:  # nothing was asked, so neither attempt nor time counts
                refusals += 1
                if not await self._wait(refusals):
                    return self._gave_up(), seconds, attempts
                continue
            self._answers()
            seconds, attempts = seconds + clock() - began, attempts + 1
            if isinstance(outcome, Answer):
                return outcome, seconds, attempts
            bad += outcome.cause in _BAD_ANSWERS
            pause = max(self._retry_pause(attempts), attempt.pause)
            if (
                outcome.cause not in _PASSING
                or attempts >= config.attempts
                or bad >= config.bad_answer_attempts
                or seconds + pause >= config.deadline
            ):
                return outcome, seconds, attempts
            await asyncio.sleep(pause)
            seconds += pause

    async def _wait(self, refusals: int) -> bool:
        """Waits while the server is down; False: it was for longer than `wait_limit`."""
        now = asyncio.get_running_loop().time()
        outage = self._outage = self._outage or _Outage(now)
        self.counters.waited(now - outage.counted)
        outage.counted = now
        down = now - outage.began
        if now - outage.logged > max(down / 2, _LONGEST_RETRY_PAUSE):  # ever more rarely
            outage.logged, url = now, self._config.url
            self._log(f"the LLM server at {url} does not answer; waiting ({down:.0f} s)")
        pause, limit = self._retry_pause(refusals), self._config.wait_limit
        if limit is not None:
            if down >= limit:
                return False
            pause = min(pause, limit - down)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await outage.over.wait()
        return True

    def _answers(self) -> None:
        """Notes that there is a connection, and wakes the calls that wait for one."""
        if (outage := self._outage) is not None:
            now = asyncio.get_running_loop().time()
            self.counters.waited(now - outage.counted)
            self._log(
                f"the LLM server at {self._config.url} answers again after "
                f"{now - outage.began:.0f} s"
            )
            self._outage = None
            outage.over.set()

    def _retry_pause(self, attempts: int) -> float:
        longest = min(self._config.retry_pause * 2 ** (attempts - 1), _LONGEST_RETRY_PAUSE)
        return longest * self._random.uniform(0.5, 1.0)

    def _gave_up(self) -> Failure:
        return Failure(
            "connection",
            f"the LLM server at {self._config.url} has not answered for "
            f"{self._config.wait_limit:g} s ({self._config.prefix}wait_limit)",
        )

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, request: Request, limit: float) -> _Attempt:
        """Sends the request once; never raises for an error of the server or the network."""
        served = self.served
        self._follow()
        try:
            # replies.py reads the replies: making the package's typed objects takes longer than
            # everything else here. Its retries are not used because they have no deadline.
            async with asyncio.timeout(limit):
                body = request.body(served.model)
                with self._connections.api() as api:
                    text = await api.post(request.path, cast_to=str, body=body)
        except TimeoutError:
            return _Attempt(Failure("timeout", f"no reply within {limit:.3g} s"))
        except openai.APIStatusError as error:
            reply = error.response
            failure = read_error(reply.status_code, self._without_key(reply.text))
            return _Attempt(failure, retry_after(reply.headers))
        except openai.APIConnectionError as error:
            reason = error.__cause__ or error
            kind = type(reason).__name__
            message = self._without_key(f"{kind}: {reason}" if str(reason) else kind)
            return _Attempt(Failure("connection", shorten(message)), refused="Connect" in kind)
        except OSError as error:  # mainly `NotOurs`
            return _Attempt(Failure("connection", shorten(str(error))), refused=True)
        except TooLarge as error:
            return _Attempt(Failure("malformed", str(error)))
        except UnicodeEncodeError:
            return _Attempt(Failure("request", "the prompt holds half a surrogate pair"))
        # Of a model that is not the client's, no version is known.
        other = isinstance(request, Sampling) and request.model not in ("", served.model)
        text = without_key(text, self._key)
        return _Attempt(read_outcome(request, text, "" if other else served.version))

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, BLOTTED) if self._key else text

    def _follow(self) -> None:
        """Uses the current URL of our own server: after a restart it may have another port."""
        if self._own is not None and (url := self._own.url) != self._url:
            self._url = url
            self._connections.follow(url)

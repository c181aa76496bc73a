"""Asks a model server: a thread with an event loop sends requests while the caller continues.

Answers are kept in one SQLite file, which processes may share and a crash does not damage.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import random
import sqlite3
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm import endpoint
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.endpoint import http_options, without_key
from qrag_jax.llm.outcomes import (
    READ,
    UNMARKED,
    UNREAD,
    Answer,
    Counters,
    Failure,
    Outcome,
    Request,
    Sampling,
    how_read,
    read_error,
    read_outcome,
    request_key,
    retry_after,
    shorten,
)
from qrag_jax.runtime.whole_files import reading

_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
_LONGEST_PAUSE = 8.0  # seconds between attempts
# httpx looks at all connections of a client for every request and reply. With 256 of them in one
# client that takes longer than all else.
_CONNECTIONS = 16

_FINAL = ("request", "too_long", "filtered", "tool_call")  # causes that would come again

_HOW_READ = {UNREAD: "not readable", UNMARKED: 'without "Final answer:"'}

_APPLICATION_ID = 0x51524147  # "QRAG", in the file's header
_BUSY_SECONDS = 3.0  # other processes usually release the file within this time
# SQLite names what is damaged by bytes of the file, which may be no text.
_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Client(contextlib.AbstractContextManager):
    """Asks any server that offers OpenAI's chat completions, completions, embeddings or `/rerank`.

    Every request ends in an `Answer` or a `Failure`; an exception means a mistake in the program.
    `ClientConfig` describes attempts, deadlines and what happens while the server is down.

    Any thread may call all methods but the client's own. A child process makes a client of its own.
    """

    def __init__(
        self,
        config: ClientConfig,
        log: Callable[[str], None] = _warn,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """`log` takes lines for people; while `ready` is False, requests wait for the server."""
        self.config, self._ready, self._log, self._closed = config, ready, log, False
        self._key = config.api_key()
        self._cache: AnswerCache | None = None
        if config.cache:
            self._cache = AnswerCache(Path(config.cache), self._log, f"{config.prefix}cache")
        self._counters = Counters(float)
        self._in_flight: dict[str, asyncio.Future[Outcome | None]] = {}
        self._down: float | None = None  # since when there is no connection to the server
        self._logged = self._counted = -math.inf
        self._up = asyncio.Event()
        self._connect()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> concurrent.futures.Future[list[Outcome]]:
        """Starts to ask; the future's result has one outcome per request, in order.

        Cancelling the future cancels the requests that have no answer yet. Its callbacks run on the
        client's thread and must not block.
        """
        if self._closed:
            raise RuntimeError("this client was closed.")
        return asyncio.run_coroutine_threadsafe(self._ask(tuple(requests)), self._loop)

    def ask_blocking(self, requests: Sequence[Request]) -> list[Outcome]:
        future = self.submit(requests)
        try:
            return future.result()
        finally:
            future.cancel()  # without effect unless Ctrl-C came first

    def counters(self) -> Counters:
        return self._counters.copy()

    def close(self) -> None:
        """Cancels requests, closes the connections and ends the thread; may be called again."""
        if self._closed:
            return
        self._closed = True
        # A task that hangs there ends with the process.
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            closing.result(timeout=_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------ on the loop: many requests

    def _connect(self) -> None:
        """Makes the HTTP clients; no connection is opened yet."""
        import httpx2

        count, config = self.config.concurrency, self.config
        self._https = [
            httpx2.AsyncClient(
                # The time of an attempt is limited by `_attempt`; this detects a host that is off.
                timeout=httpx2.Timeout(None, connect=min(_CONNECT_SECONDS, config.attempt_timeout)),
                limits=httpx2.Limits(
                    max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS
                ),
                **http_options(config.url, self._key, httpx2.AsyncHTTPTransport),
            )
            for _ in range(-(-count // _CONNECTIONS))
        ]
        # Each slot is a right to use one connection; the connections used last are used first.
        self._slots: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
        for slot in reversed(range(count)):
            self._slots.put_nowait(self._https[slot // _CONNECTIONS])

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._cache is not None:
            await asyncio.to_thread(self._cache.close)
        for http in self._https:
            await http.aclose()

    async def _ask(self, requests: Sequence[Request]) -> list[Outcome]:
        model, version = self.config.model, self.config.version
        keys = [request_key(r, model, version) if r.greedy else "" for r in requests]
        known: dict[str, Answer] = {}
        if self._cache is not None and (wanted := [*{*keys} - {""}]):
            # The cache may wait for the disk and for other processes.
            known = await asyncio.to_thread(self._cache.get, wanted)
            self._counters["cache_skipped"] = self._cache.skipped
        pairs = zip(requests, keys, strict=True)
        outcomes = await asyncio.gather(*(self._ask_once(r, k, known.get(k)) for r, k in pairs))
        for request, outcome in zip(requests, outcomes, strict=True):
            self._count_reading(request, outcome)
        return outcomes

    def _count_reading(self, request: Request, outcome: Outcome) -> None:
        """Counts how an answer was read; logs the first of each kind that was not read well."""
        kind = how_read(request, outcome)
        if kind == READ or not isinstance(outcome, Answer):
            return
        if not self._counters[kind]:
            kept = f"not kept in {self.config.cache}" if kind == UNREAD else "its last line counts"
            cached = f"; {kept}" if self.config.cache or kind != UNREAD else ""
            self._log(
                f"a reply of {self.config.model} is {_HOW_READ[kind]}: {shorten(outcome.text)!r} "
                f"(llm/{kind} counts them{cached})"
            )
        self._counters[kind] += 1

    async def _ask_once(self, request: Request, key: str, cached: Answer | None) -> Outcome:
        """The cached answer, that of an identical request in flight, or a new one, which is kept.

        A request without a `key` is always asked.
        """
        if cached is not None and how_read(request, cached) != UNREAD:
            self._counters["cache_hits"] += 1
            return cached
        if not key:
            return await self._call(request)
        while (joined := self._in_flight.get(key)) is not None:
            if (outcome := await asyncio.shield(joined)) is not None:
                self._counters["shared"] += isinstance(outcome, Answer)
                return outcome
            # That request was cancelled together with its `ask`, so this one may ask now.
        self._in_flight[key] = shared = asyncio.get_running_loop().create_future()
        outcome = None
        try:
            outcome = await self._call(request)
        finally:
            del self._in_flight[key]
            shared.set_result(outcome)
        if self._cache and isinstance(outcome, Answer) and how_read(request, outcome) != UNREAD:
            await asyncio.to_thread(self._cache.put, key, outcome)
        return outcome

    # ------------------------------------------------ on the loop: one request

    async def _call(self, request: Request) -> Outcome:
        """Tries until there is an answer, a final failure, or no attempts or time are left."""
        config, clock = self.config, self._loop.time
        seconds, attempts, refusals = 0.0, 0, 0  # of the deadline; those that count
        http = await self._slots.get()
        try:
            while True:
                began = clock()
                limit = min(config.attempt_timeout, config.deadline - seconds)
                if (reply := await self._attempt(http, request, limit)) is None:
                    refusals += 1  # nothing was asked, so neither attempt nor time counts
                    if await self._wait(refusals):
                        continue
                    why = f"no answer for {config.wait_limit:g} s ({config.prefix}wait_limit)"
                    outcome: Outcome = Failure("connection", f"{config.url}: {why}")
                    break
                self._note_answer()
                outcome, asked_pause = reply
                seconds, attempts = seconds + clock() - began, attempts + 1
                pause = max(self._pause(attempts), asked_pause)
                if (
                    isinstance(outcome, Answer)
                    or outcome.cause in _FINAL
                    or attempts >= config.attempts
                    or seconds + pause >= config.deadline
                ):
                    break
                await asyncio.sleep(pause)
                seconds += pause
        finally:
            self._slots.put_nowait(http)
        if isinstance(outcome, Failure):
            outcome = dataclasses.replace(outcome, attempts=attempts)
        self._counters.called(outcome, seconds, attempts)
        return outcome

    async def _attempt(
        self, http: Any, request: Request, limit: float
    ) -> tuple[Outcome, float] | None:
        """Sends the request once: the outcome, and the seconds that the server asks to wait.

        None: there is no connection to the server. It never raises for an error of the server or
        the network.
        """
        import httpx2

        if not self._ready():
            return None
        config = self.config
        body = json.dumps(request.body(config.model), ensure_ascii=False)
        try:
            async with asyncio.timeout(limit):
                status, headers, text = await self._post(http, request.path, body.encode())
        except TimeoutError:
            return Failure("timeout", f"no reply within {limit:.3g} s"), 0.0
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            return None
        except httpx2.HTTPError as error:
            message = f"{type(error).__name__}: {error}"
            return Failure("connection", shorten(without_key(message, self._key, 1))), 0.0
        except endpoint.TooLarge as error:
            return Failure("malformed", str(error)), 0.0
        except UnicodeEncodeError:
            return Failure("request", "the prompt holds half a surrogate pair"), 0.0
        if status >= 300:
            return read_error(status, without_key(text, self._key, 1)), retry_after(headers)
        # Of a model that is not the client's, no version is known.
        other = isinstance(request, Sampling) and request.model not in ("", config.model)
        version = "" if other else config.version
        return read_outcome(request, without_key(text, self._key), version), 0.0

    async def _post(self, http: Any, path: str, sent: bytes) -> tuple[int, Any, str]:
        headers = {"Content-Type": "application/json"}
        async with http.stream("POST", path, content=sent, headers=headers) as reply:
            body = bytearray()
            async for part in reply.aiter_raw():
                body += part
                endpoint.check_reply(reply.headers, len(body))
            return reply.status_code, reply.headers, body.decode("utf-8", "replace")

    async def _wait(self, refusals: int) -> bool:
        """Waits while the server is down; False: it was for longer than `wait_limit`."""
        now = self._loop.time()
        if self._down is None:
            self._down, self._counted, self._logged = now, now, -math.inf
            self._up.clear()
        self._counters["waited_seconds"] += now - self._counted
        self._counted, down = now, now - self._down
        if now - self._logged > max(down / 2, _LONGEST_PAUSE):  # ever more rarely
            self._logged, url = now, self.config.url
            self._log(f"the LLM server at {url} does not answer; waiting ({down:.0f} s)")
        pause, limit = self._pause(refusals), self.config.wait_limit
        if limit is not None:
            if down >= limit:
                return False
            pause = min(pause, limit - down)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._up.wait(), pause)
        return True

    def _note_answer(self) -> None:
        """Notes that there is a connection, and wakes the calls that wait for one."""
        if self._down is not None:
            now = self._loop.time()
            self._counters["waited_seconds"] += now - self._counted
            down, self._down = now - self._down, None
            self._log(f"the LLM server at {self.config.url} answers again after {down:.0f} s")
            self._up.set()

    def _pause(self, attempts: int) -> float:
        longest = min(self.config.retry_pause * 2 ** min(attempts - 1, 30), _LONGEST_PAUSE)
        return longest * random.uniform(0.5, 1.0)


class AnswerCache:
    """Answers by `outcomes.request_key`; the file holds no prompts and no API key.

    While the file cannot be used, such as while another process holds it for long, answers are not
    looked up or kept, which `skipped` counts; the first time is logged. All methods may wait for
    the disk and for others, so they must not run on an event loop.
    """

    def __init__(self, path: Path, log: Callable[[str], None], field: str = "cache") -> None:
        """`field` names the setting that gives the file, for messages."""
        self.path, self.skipped = path, 0
        self._log, self._lock, self._closed = log, threading.Lock(), False
        with reading(f"{field}={path}", "delete it, or give another file", _ERRORS):
            path.parent.mkdir(parents=True, exist_ok=True)
            # One thread makes it and another uses it; `_lock` lets only one in at a time. Each
            # statement is a transaction.
            self._file = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None
            )
            # Of several processes that make the same file, only one may be here at a time.
            self._file.execute("BEGIN IMMEDIATE")
            (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (owner,) = self._file.execute("PRAGMA application_id").fetchone()
            if tables and owner != _APPLICATION_ID:
                raise InputError(f"{field}={path} is no cache of answers; give another file.")
            self._file.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            table = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT)"
            self._file.execute(table)
            self._file.execute("SELECT key, answer FROM answers LIMIT 1").fetchone()
            self._file.execute("COMMIT")
            # Refused, without waiting, while another process uses a new file for the first time.
            with contextlib.suppress(sqlite3.OperationalError):
                self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")  # enough to survive a crash

    def get(self, keys: Sequence[str]) -> dict[str, Answer]:
        """The answers that the cache has, by key."""
        answers: dict[str, Answer] = {}
        query = "SELECT key, answer FROM answers WHERE key IN (SELECT value FROM json_each(?))"
        for key, text in self._run(query, [json.dumps(keys)], len(keys)):
            fields = json.loads(text)
            fields |= {name: tuple(fields[name]) for name in ("token_ids", "log_probs", "vectors")}
            answers[key] = Answer(**fields)
        return answers

    def put(self, key: str, answer: Answer) -> None:
        row = key, json.dumps(dataclasses.asdict(answer))
        self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", row)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._file.close()

    def _run(self, statement: str, values: Sequence[Any], count: int = 1) -> list[Any]:
        """The rows that it selects; none if it is not possible."""
        with self._lock:
            if self._closed:
                return []
            try:
                return self._file.execute(statement, values).fetchall()
            except _ERRORS as error:
                if not self.skipped:
                    self._log(f"{self.path}: {error}; going on without the cache of answers")
                self.skipped += count
                return []

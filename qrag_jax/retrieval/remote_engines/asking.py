"""Asks for a page until it comes or no attempt is left; each attempt begins from nothing.

Whose fault is a `Refused`? The service is asked an ordinary query. If it answers that one and then
refuses ours again, twice over, the query cannot be read, which is a result: it finds nothing. If it
does not answer, the service is down, which is a failure.
"""

from __future__ import annotations

import random
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple

from qrag_jax.llm.client.replies import read_error, retry_after, shorten
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines.config import RemoteEngineConfig
from qrag_jax.retrieval.remote_engines.rate_limit import RateLimit, Timing
from qrag_jax.retrieval.remote_engines.sending import Received, Sender
from qrag_jax.retrieval.remote_engines.service import Page, Part, Refused, Service

_LONGEST_PAUSE = 30.0
_ORDINARY = "cancer"  # a query that any service of medical texts can read
_PROOFS = 2  # times that it must be answered between refusals of a query
# Causes that may pass, so that the same request is sent again.
_PASSING = ("timeout", "connection", "server", "rate_limit", "malformed")


class Patience:
    """How long the searches of one call wait for a service that gives no answer at all.

    Any thread may call all methods.

    Args:
        seconds: without an answer.
        now: the clock.
    """

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds, self._now = seconds, now
        self._answered = now()
        self._ended: Failure | None = None

    @property
    def over(self) -> Failure | None:
        """Why no more requests should be sent; None: they may be."""
        if self._ended is None and self._now() - self._answered > self._seconds:
            for_long = f"nothing was answered for {self._seconds:g} s (config.engine.patience)"
            return Failure("connection", f"not asked any more, as {for_long}")
        return self._ended

    def answered(self) -> None:
        """Notes that an answer came."""
        self._answered = self._now()

    def end(self, why: Failure) -> None:
        """Ends it before its time."""
        self._ended = self._ended or why


class _Attempt(NamedTuple):
    """What came of one request; `wait`: seconds that the service asks to wait."""

    outcome: Page | Failure
    wait: float = 0.0


class Asker:
    """Gets pages of one service. Any thread may ask.

    Args:
        service: what is asked.
        sender: sends the requests.
        limit: lets them through.
        config: attempts and pauses.
        timing: the clock.
    """

    def __init__(
        self,
        service: Service,
        sender: Sender,
        limit: RateLimit,
        *,
        config: RemoteEngineConfig,
        timing: Timing,
    ) -> None:
        self._service, self._sender, self._limit = service, sender, limit
        self._config, self._timing = config, timing
        self._random = random.Random()

    def ask(self, part: Part, patience: Patience) -> Page | Failure:
        """The page, or the failure of the last attempt."""
        proofs = 0
        for attempt in range(1, self._config.attempts + 1):
            if over := patience.over:
                return self._failed(over, attempt - 1)
            outcome, wait = self._attempt(part, patience)
            if isinstance(outcome, Page):
                return outcome
            if isinstance(outcome, Refused):
                if proofs == _PROOFS:
                    return Page((), unreadable=True)
                control = part._replace(query=_ORDINARY, size=1, cursor="")
                proofs += isinstance(self._attempt(control, patience).outcome, Page)
            if wait > self._config.longest_wait:
                asked = f"asks to wait {wait:.0f} s, more than config.engine.longest_wait"
                outcome = Failure(outcome.cause, f"{asked} ({outcome.message})")
                patience.end(outcome)  # the other searches would be told the same
                return self._failed(outcome, attempt)
            if attempt == self._config.attempts or outcome.cause not in _PASSING:
                return self._failed(outcome, attempt)
            pause = self._pause(attempt)
            if outcome.cause == "rate_limit":
                self._limit.hold(pause)  # for all threads
            else:
                self._timing.sleep(pause)
        raise AssertionError("there is one attempt at least")

    def _attempt(self, part: Part, patience: Patience) -> _Attempt:
        """Sends one request, which depends on nothing that came before."""
        self._limit.wait()
        received = self._sender.send(self._service.request(part))
        if isinstance(received, Failure):
            return _Attempt(received)
        outcome = self._read(received, part)
        if isinstance(outcome, Page):
            patience.answered()
            return _Attempt(outcome)
        wait = retry_after(received.headers) if received.status in (429, 503) else 0.0
        if wait <= self._config.longest_wait:
            self._limit.hold(wait)
        return _Attempt(outcome, wait)

    def _read(self, received: Received, part: Part) -> Page | Failure:
        status = received.status
        if 300 <= status < 400:
            where = _host(received.headers.get("location", "")) or "another address"
            return Failure("request", f"HTTP {status}: a redirect to {where} is not followed")
        if status == 408:
            return Failure("timeout", "HTTP 408: the service waited too long for the request")
        if status in (200, 400):
            outcome = self._service.read(received, part)
            # With 400, a body may tell of a bad query, and of nothing else.
            bad_query = isinstance(outcome, Page) and outcome.unreadable
            if status == 200 or bad_query or isinstance(outcome, Refused):
                return outcome
        return read_error(status, received.text)

    def _pause(self, attempts: int) -> float:
        longest = min(self._config.pause * 2 ** (attempts - 1), _LONGEST_PAUSE)
        return longest * self._random.uniform(0.5, 1.0)

    def _failed(self, why: Failure, attempts: int) -> Failure:
        return Failure(why.cause, f"{self._service.title}: {why.message}", attempts)


def _host(url: str) -> str:
    """The host alone: the rest of the address may repeat the query."""
    try:
        return shorten(urllib.parse.urlsplit(url).hostname or "")
    except ValueError:
        return ""

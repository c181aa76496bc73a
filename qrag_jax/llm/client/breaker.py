"""A circuit breaker: while the server is down, calls wait and one probe at a time checks it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable

_LONGEST_PAUSE = 30.0


class Server(enum.Enum):
    """The state of the server that `CircuitBreaker.wait` found."""

    UP = "up"
    CAME_BACK = "came back"  # a probe showed that it was down; now it answers
    STILL_DOWN = "still down"  # for longer than the limit


class _Outage:
    """The time from the failed call that opens the breaker until a probe is answered."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.over = asyncio.Event()
        self.confirmed = False


class CircuitBreaker:
    """Opens when the server does not answer, closes when a probe is answered.

    Use it on one event loop only. While it is open, calls wait and a task probes the server: at
    once, after `pause` seconds, and then after pauses that double up to 30 s. Each failed probe is
    logged.

    Attributes:
        name: the server's name in messages: its URL.
        probe: returns whether the server answers; limits its own time.
        failures: failed calls in a row that open it; a refused connection opens it at once.
        pause: seconds between the first two probes.
        limit: seconds of an outage after which calls fail instead of waiting; None: never.
        log: receives lines for people.
        waited: receives the seconds of waiting, as they pass.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], Awaitable[bool]],
        *,
        failures: int,
        pause: float,
        limit: float | None,
        log: Callable[[str], None],
        waited: Callable[[float], None],
    ) -> None:
        self.name, self.probe, self.failures, self.pause = name, probe, failures, pause
        self.limit, self.log, self.waited = limit, log, waited
        self._in_a_row = 0
        self._outage: _Outage | None = None
        self._prober: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls have to wait."""
        return self._outage is not None

    def succeeded(self) -> None:
        """Notes that the server answered a call, even if it refused the request."""
        self._in_a_row = 0

    def failed(self, refused: bool) -> None:
        """Notes that a call found no server, or a broken one; `refused`: no connection at all."""
        self._in_a_row += 1
        if self._outage is None and (refused or self._in_a_row >= self.failures):
            self._outage = _Outage(asyncio.get_running_loop().time())
            self._prober = asyncio.create_task(self._probe_until_answered(self._outage))

    async def wait(self) -> Server:
        """Waits until calls may be sent or the limit has passed."""
        outage = self._outage
        if outage is None:
            return Server.UP
        ends = None if self.limit is None else outage.began + self.limit
        try:
            async with asyncio.timeout_at(ends):
                await outage.over.wait()
        except TimeoutError:
            return Server.STILL_DOWN
        return Server.CAME_BACK if outage.confirmed else Server.UP

    async def _probe_until_answered(self, outage: _Outage) -> None:
        clock, pause, counted = asyncio.get_running_loop().time, self.pause, outage.began
        while not await self.probe():
            outage.confirmed = True
            self.log(
                f"the LLM server at {self.name} does not answer; waiting "
                f"({clock() - outage.began:.0f} s)"
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            now = clock()
            self.waited(now - counted)
            counted = now
        self.waited(clock() - counted)
        if outage.confirmed:
            self.log(
                f"the LLM server at {self.name} answers again after {clock() - outage.began:.0f} s"
            )
        self._in_a_row = 0
        self._outage = None
        outage.over.set()

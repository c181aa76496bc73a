"""Waiting for a server that is down: calls stop at once, one probe at a time asks if it is back."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable

_LONGEST_PAUSE = 30.0


class Server(enum.Enum):
    """What `CircuitBreaker.wait` found."""

    UP = "up"
    CAME_BACK = "came back"  # it was down, as a probe showed, and now answers
    STILL_DOWN = "still down"  # for longer than one may wait


class _Outage:
    """From the last call sent until a probe is answered."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.over = asyncio.Event()
        self.confirmed = False


class CircuitBreaker:
    """Opens when the server does not answer, closes when a probe is answered.

    To be used on one event loop. While it is open nobody calls; a task probes at once, then after
    pauses of `pause` seconds doubling up to half a minute, and tells `log` each time.

    Attributes:
        name: what the server is called in messages, its URL.
        probe: whether the server answers; bounds its own time.
        failures: calls in a row that fail before it opens; a refused connection opens it at once.
        pause: seconds after the first probe without an answer.
        limit: seconds after which an outage makes calls fail rather than wait, None: never.
        log: takes lines for people. waited: takes the seconds of waiting, as they pass.
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
        """The server answered a call, with whatever it said."""
        self._in_a_row = 0

    def failed(self, refused: bool) -> None:
        """A call met no server, or one that is broken."""
        self._in_a_row += 1
        if self._outage is None and (refused or self._in_a_row >= self.failures):
            self._outage = _Outage(asyncio.get_running_loop().time())
            self._prober = asyncio.create_task(self._probe_until_answered(self._outage))

    async def wait(self) -> Server:
        """Returns when calls may be sent, or the limit has passed."""
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

"""Ends what an environment does for too long; the time in which the model speaks does not count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from .wire import EpisodeFailed

T = TypeVar("T")
_LOOK_EVERY = 0.2  # seconds


class Clock:
    """Seconds that an environment has worked by itself.

    Attributes:
        limit: seconds; 0: none.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._began, self._spoken, self._speaking, self._since = time.monotonic(), 0.0, 0, 0.0

    def speaks(self, *, on: bool) -> None:
        """The model begins, or ends, to speak; several turns may overlap."""
        if on and not self._speaking:
            self._since = time.monotonic()
        self._speaking += 1 if on else -1
        if not on and not self._speaking:
            self._spoken += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        """Without those in which the model spoke."""
        now = time.monotonic()
        spoken = self._spoken + (now - self._since if self._speaking else 0.0)
        return now - self._began - spoken

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives.

        Raises:
            EpisodeFailed: it took too long, and was cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_EVERY))[0]:
                if self.limit and self.seconds > self.limit:
                    raise EpisodeFailed(
                        "timeout",
                        f"the environment worked for more than {self.limit:g} s "
                        "(config.env.seconds)",
                    )
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                # It may refuse to end; then nobody waits for it.
                await asyncio.wait({task}, timeout=2.0)

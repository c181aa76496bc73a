"""How often a service is asked: all threads of a process keep a distance between requests."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Timing:
    """A clock and how one waits by it.

    Attributes:
        now: seconds since any moment; never goes back.
        sleep: waits for some seconds.
    """

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class RateLimit:
    """Lets requests through one by one, at least 1 / `per_second` seconds apart.

    Any thread may call all methods.

    Args:
        per_second: requests in a second, above 0.
        timing: the clock.
    """

    def __init__(self, per_second: float, timing: Timing | None = None) -> None:
        self._gap, self._timing = 1.0 / per_second, timing or Timing()
        self._free = self._timing.now()  # when the next request may go
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Returns when a request may be sent; the caller must then send one."""
        while True:
            with self._lock:
                left = self._free - self._timing.now()
                if left <= 0:
                    self._free = self._timing.now() + self._gap
                    return
            self._timing.sleep(left)

    def hold(self, seconds: float) -> None:
        """Lets nothing through for so long, as a service asks for that is asked too often."""
        with self._lock:
            self._free = max(self._free, self._timing.now() + seconds)

    def slow_to(self, per_second: float) -> None:
        """Lowers the rate to this one; it is never raised."""
        with self._lock:
            self._gap = max(self._gap, 1.0 / per_second)


_limits: dict[str, RateLimit] = {}
_making = threading.Lock()


def shared_limit(host: str, per_second: float) -> RateLimit:
    """The limit of a host, the same for the whole process; of several rates the lowest holds."""
    with _making:
        limit = _limits.setdefault(host, RateLimit(per_second))
    limit.slow_to(per_second)
    return limit

"""Stops a run in good order: on SIGTERM, on Ctrl-C, when its terminal closes, or by a system."""

from __future__ import annotations

import concurrent.futures
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, TypeVar

LOOK_EVERY = 0.1  # seconds between looks for a signal to stop

T = TypeVar("T")


class Stopped(Exception):
    """The run is to stop; the message names the signal."""


class EndedEarly(Exception):
    """Why; the message is one sentence for the user. The run is saved, and no error."""


class StopSignal:
    """Inside the block, SIGTERM, SIGINT and SIGHUP only set a flag, which the loop checks.

    A SIGHUP that was ignored before, for example by `nohup`, stays ignored. A second SIGINT raises
    KeyboardInterrupt at once, so Ctrl-C twice ends a run that hangs. On exit the earlier handlers
    are restored. A handler that was not installed from Python cannot be restored; its signal then
    has the default action.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name: str | None = None  # of the first signal that came, such as "SIGTERM"
        self._caught = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self._caught -= {signal.SIGHUP}
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:  # in the main thread alone
        self._before = {number: signal.signal(number, self._handle) for number in self._caught}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def check(self) -> None:
        """Raises `Stopped` if a signal came."""
        if self.requested:
            raise Stopped(self.name)

    check_alone = check  # also where other hosts do not stop; see `hosts.AgreedStop`

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        self.requested, self.name = True, self.name or signal.Signals(number).name
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt


def wait_for(future: concurrent.futures.Future[T], check: Callable[[], object]) -> T:
    """The result of a future; until it is there, `check` is called, which may raise."""
    while not concurrent.futures.wait([future], LOOK_EVERY).done:
        check()
    return future.result()

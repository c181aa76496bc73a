"""Stops a run in good order: on SIGTERM, on Ctrl-C, when its terminal closes, or by a system."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """The run is to stop; the message names the signal."""


class StopSignal:
    """Inside the block, SIGTERM, SIGINT and SIGHUP only set a flag, which the loop checks.

    A SIGHUP that was ignored before, for example by `nohup`, stays ignored. A second SIGINT raises
    KeyboardInterrupt at once, so Ctrl-C twice ends a run that hangs. On exit the earlier handlers
    are restored. A handler that was not installed from Python cannot be restored; its signal then
    has the default action.

    Attributes:
        requested: whether a signal came.
        name: name of the first signal, such as "SIGTERM"; None until a signal comes.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name: str | None = None
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """Those that are caught."""
        return _SIGNALS

    def __enter__(self) -> Self:
        """Installs the handlers, which only the main thread can."""
        for number in self.signals:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def check(self) -> None:
        """Raises `Stopped` if a signal came."""
        if self.requested:
            raise Stopped(self.name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.name = True, self.name or signal.Signals(number).name
        self._count_interrupt(number)

    def _count_interrupt(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt


class EndedEarly(Exception):
    """Why; the message is one sentence for the user. The run is saved, and no error."""

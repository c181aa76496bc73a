"""A stop signal that all hosts of a run heed before the same step, whichever of them got it."""

from __future__ import annotations

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils

from qrag_jax.runtime.interrupt import StopSignal


class AgreedStop(StopSignal):
    """As `StopSignal`; of several hosts, a signal to one stops all before the same step.

    JAX's preemption sync finds that step. It listens to SIGTERM itself, from when the hosts joined,
    so there is no handler for it here, and other signals are passed on as SIGTERM. Between two
    steps `check` does not stop a host, because the others would wait for it in vain.
    """

    def __init__(self) -> None:
        super().__init__()
        self._several = jax.process_count() > 1

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """Those that are caught here."""
        caught = super().signals
        return tuple(each for each in caught if not self._several or each != signal.SIGTERM)

    def before_step(self, step: int) -> None:
        """All hosts call this before each step, with one more each time.

        Raises:
            Stopped: a signal came, to this host or to another one.
        """
        if self._several and multihost_utils.reached_preemption_sync_point(step):
            self.requested, self.name = True, signal.SIGTERM.name
        self.check()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
            self._count_interrupt(number)
        else:
            super()._handle(number, frame)

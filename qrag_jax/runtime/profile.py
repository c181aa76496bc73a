"""Traces of a few training steps, for TensorBoard's profile plugin and Perfetto."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

PERFETTO_NAME = "perfetto_trace.json.gz"


class StepProfile:
    """Traces `steps` training steps, without the first two of this start, which compile.

    Use as a context manager around the loop. In whichever way the loop ends, an open trace is
    written with the steps so far. Only the first host traces.

    Args:
        folder: gets `plugins/profile/DATE/` with an `.xplane.pb` (TensorBoard) and
            `perfetto_trace.json.gz`.
        steps: steps to trace; 0 traces nothing.
        done: steps done before this start.
        log: prints a line that says where the trace is.
    """

    SKIPPED = 2

    def __init__(self, folder: Path, steps: int, done: int, log: Callable[[str], None]) -> None:
        self.folder = folder
        self._begin = done + self.SKIPPED + 1  # step traced first
        self._end = self._begin + steps  # first step after the trace
        self._wanted = steps > 0 and jax.process_index() == 0
        self._log = log
        self._first: int | None = None  # step traced first, while a trace is open
        self._last = 0  # last step traced so far

    def turn(self, step: int, running: Any) -> None:
        """Opens the trace before the first step to trace, and closes it after the last one.

        It first waits until the arrays in `running` are computed, so that the trace holds whole
        steps.

        Args:
            step: the step that is about to begin.
            running: arrays that the device may still be computing.
        """
        if self._wanted and step == self._begin:
            jax.block_until_ready(running)
            options = jax.profiler.ProfileOptions()
            # Else every Python call is an event: a million in seconds, which crowd out the rest.
            options.python_tracer_level = 0
            jax.profiler.start_trace(
                self.folder, create_perfetto_trace=True, profiler_options=options
            )
            self._first = step
        elif self._first is not None and step == self._end:
            jax.block_until_ready(running)
            self._close()

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Marks the host's part of a step; viewers group the device's work by these marks."""
        if self._first is None:
            return contextlib.nullcontext()
        self._last = step
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._first is not None:
            try:
                self._close()
            except Exception as failure:
                if error is None:
                    raise
                self._log(f"the profile cannot be written: {failure}")
        elif self._wanted:
            self._log(f"nothing profiled: this start had not more than {self.SKIPPED} steps.")

    def _close(self) -> None:
        first, self._first = self._first, None
        self._wanted = False
        jax.profiler.stop_trace()
        files = self.folder.glob(f"plugins/profile/*/{PERFETTO_NAME}")
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        board = f"run tensorboard --logdir={shlex.quote(str(self.folder))}"
        if newest is not None:  # the disk may be full
            board = f"open {newest} at https://ui.perfetto.dev, or {board}"
        self._log(f"profile of steps {first} to {self._last}: {board}")

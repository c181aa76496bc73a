"""A process with which lines of JSON are exchanged, over its standard input and output.

An environment of `verifiers` runs in one, since it cannot share the trainer's Python, and so do the
functions that a user gives as tools, which may hang or die. The other end is
`environments.verifiers_side.program.Link`. The first message is `open`; the process replies
`opened`, or `refused` with a sentence for the user.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime.interrupt import LOOK_EVERY

_ENDS_WITHIN = 3.0  # seconds that the process has to end by itself
_START_LIMIT = 600.0  # seconds: data sets are made and read meanwhile


class ProcessLost(Exception):
    """The process has ended, or does not answer; the message is one sentence."""


def has_ended(process: subprocess.Popen[Any]) -> bool:
    """Whether the process has ended. Unlike `poll`, it does not release the process number."""
    if process.returncode is not None:
        return True
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def end_group(process: subprocess.Popen[Any], seconds: float) -> None:
    """Closes a process's input; after so many seconds kills what is left of the group it leads."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.close()
    limit = time.monotonic() + seconds
    while not has_ended(process) and time.monotonic() < limit:
        time.sleep(LOOK_EVERY / 2)
    # The leader was not waited for yet, so no other group can have its number.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class LineProcess:
    """Starts the process, and starts it again when it was lost.

    Args:
        log: takes what it prints.
        fields: of the message `open`.
        name: what messages call that which runs in it.
    """

    def __init__(
        self, command: Sequence[str], log: Path, fields: Mapping[str, Any], name: str
    ) -> None:
        self.command, self.fields, self.starts = command, fields, 0
        self.messages = queue.SimpleQueue[dict[str, Any] | None]()  # None: it has ended
        self._log, self._name = log, name
        self._process: subprocess.Popen[str] | None = None
        self._opened: dict[str, Any] | None = None

    def start(self, check: Callable[[], None] = lambda: None) -> Any:
        """Starts it, unless it runs; returns its message `opened`, or raises `ProcessLost`.

        `check` is called while this waits; it may raise.
        """
        if self._process is not None and self._process.poll() is None and self._opened is not None:
            return self._opened
        self.end()
        self._begin()
        self.say("open", **self.fields)
        ends = time.monotonic() + _START_LIMIT
        while True:
            check()
            try:
                message = self.messages.get(timeout=LOOK_EVERY)
            except queue.Empty:
                if time.monotonic() > ends:
                    self.end()
                    late = f"was not open after {_START_LIMIT:.0f} s; see {self._log}"
                    raise ProcessLost(f"{self._name} {late}") from None
                continue
            if message is None:
                raise ProcessLost(f"the process of {self._name} {self.status()}")
            if message["op"] == "refused":
                self.end()
                raise InputError(f"{message['message'].removesuffix('.')}.")
            if message["op"] == "opened":
                self._opened = message
                return message

    def say(self, op: str, **fields: Any) -> None:
        """Sends a message; nothing happens if the process has ended."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            process.stdin.flush()

    def status(self) -> str:
        status = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(timeout=1.0)
        how = "does not answer" if status is None else f"has ended with the status {status}"
        with contextlib.suppress(OSError, IndexError):
            last = self._log.read_text(errors="replace").strip().splitlines()[-1]
            how += f" ({last.strip()[:200]})"
        return f"{how}; see {self._log}"

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        end_group(process, _ENDS_WITHIN)
        with contextlib.suppress(OSError):  # nothing was printed, and a refused run leaves nothing
            if not self._log.stat().st_size:
                self._log.unlink()
        # Its last words are of no use to the next one.
        self.messages = queue.SimpleQueue()

    def _begin(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        messages = self.messages = queue.SimpleQueue()
        with self._log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603
                [*self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        self._process, self._opened = process, None
        self.starts += 1

        def read() -> None:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    messages.put(json.loads(line))
            except ValueError:
                pass  # half a line of a process that was killed
            finally:
                messages.put(None)

        threading.Thread(target=read, name=self._name, daemon=True).start()

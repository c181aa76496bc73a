"""The process that plays environments of `verifiers`, as the trainer sees it.

Its Python is another, since `verifiers` cannot share the trainer's environment. Both sides speak
lines of JSON; `verifiers_side.program` says which.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.text.scaffolds import ChatRenderer, TextLost

PROGRAM = Path(__file__).parent / "verifiers_side"
_LOOK_EVERY = 0.1  # seconds
_ENDS_WITHIN = 3.0  # seconds that it has to end by itself
_START_LIMIT = 600.0  # seconds: data sets are made and read meanwhile


class ProcessLost(Exception):
    """The process has ended, or does not answer; the message is one sentence."""


class About(NamedTuple):
    version: str  # of verifiers
    tasks: int  # how many it has
    prompts: list[list[dict[str, Any]]]  # the first messages of some tasks
    digest: str  # of the tasks
    code: str  # a digest of its package's Python files


class EnvironmentProcess:
    """Starts the process, and starts it again when it was lost."""

    def __init__(self, python: str, log: Path, fields: Mapping[str, Any]) -> None:
        """`log` takes what it prints; `fields` are those of the message `open`."""
        self.messages = queue.SimpleQueue[dict[str, Any] | None]()  # None: it has ended
        self.about: About | None = None  # what the environment says of itself, once started
        self.renderer: ChatRenderer | None = None  # of the texts that it asks for, once it plays
        self.starts = 0
        self._python, self._log, self._fields = python, log, fields
        self._process: subprocess.Popen[str] | None = None
        self._saying = threading.Lock()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, check: Callable[[], None]) -> About:
        """Starts it, unless it runs; waits until its environment is open, or raises ProcessLost.

        `check` is called while this waits; it may raise.
        """
        if self.runs and self.about is not None:
            return self.about
        self.end()
        self._begin()
        self.say("open", **self._fields)
        ends = time.monotonic() + _START_LIMIT
        while True:
            check()
            try:
                message = self.messages.get(timeout=_LOOK_EVERY)
            except queue.Empty:
                if time.monotonic() > ends:
                    self.end()
                    raise ProcessLost(
                        f"the environment was not open after {_START_LIMIT:.0f} s; see {self._log}"
                    ) from None
                continue
            if message is None:
                raise ProcessLost(f"the environment's process {self.status()}")
            if message["op"] == "refused":
                self.end()
                raise InputError(f"{message['message']}.")
            if message["op"] == "opened":
                break
        found = About(*(message[name] for name in About._fields))
        if self.about is not None and found.digest != self.about.digest:
            self.end()
            raise InputError(
                f"the tasks of {self._fields['id']!r} vary; give a seed in config.env.arguments."
            )
        self.about = found
        return found

    def say(self, op: str, **fields: Any) -> None:
        """Sends a message, from any thread; nothing happens if the process has ended."""
        if self._process is not None:
            self._send(self._process, op, fields)

    def _send(self, process: subprocess.Popen[str], op: str, fields: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        with self._saying, contextlib.suppress(OSError, ValueError):
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
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_ENDS_WITHIN)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Its last words are of no use to the next one.
        self.messages = queue.SimpleQueue()

    def _begin(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        messages = self.messages = queue.SimpleQueue()
        try:
            with self._log.open("ab") as log:
                # The program's path and nothing of the environment's is in its arguments.
                process = subprocess.Popen(  # noqa: S603
                    [self._python, str(PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,
                )
        except OSError as error:
            raise InputError(
                f"config.env.python, {self._python}, does not run ({error.strerror}); name another."
            ) from None
        self._process = process
        self.starts += 1

        def read() -> None:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    message = json.loads(line)
                    if message["op"] == "render":  # at once, also while episodes are sampled
                        answer = {"call": message["call"], **self._rendered(message)}
                        self._send(process, "answer", answer)
                    else:
                        messages.put(message)
            except ValueError:
                pass  # half a line of a process that was killed
            finally:
                messages.put(None)

        threading.Thread(target=read, name="environment", daemon=True).start()

    def _rendered(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Ids of an opening, ids behind sampled ones (None: turns are rewritten), or a message."""
        renderer, tools = self.renderer, asked.get("tools") or []
        assert renderer is not None
        said = np.array(asked.get("token_ids", ()), np.int32)
        try:
            if asked["what"] == "spoken":
                return renderer.spoken(said)._asdict()
            if asked["what"] == "opening":
                ids: np.ndarray | None = renderer.opening(asked["messages"], tools)
            else:
                ids = renderer.after(said, asked["messages"], tools)
        except (TextLost, KeyError, TypeError) as error:
            return {"error": str(error)}
        return {"token_ids": None if ids is None else ids.tolist()}

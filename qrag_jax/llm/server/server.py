"""Starts a vLLM server next to the trainer, waits for it, restarts it and stops it.

The server has a separate Python environment and separate processes. They run under `watchdog`,
which stops them when this process is gone. It listens on a Unix socket in a folder that only this
user may enter, so the kernel keeps everyone else out.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.llm.config import ServerConfig
from qrag_jax.llm.endpoint import UNIX, Endpoint
from qrag_jax.llm.server import watchdog
from qrag_jax.runtime.whole_files import weights_folder

LOOK_EVERY = 0.2  # seconds
LOG_EVERY = 10.0  # seconds between two lines while the server starts
LONGEST_BACKOFF = 60.0
HEALTHY_AFTER = 300.0  # seconds of service, after which restarts are counted from zero again


class Server:
    """A vLLM process that is kept running. It is started once and cannot be started after `stop`.

    As a context manager, it is ready on entry, and none of its processes is left on exit. In
    between, a thread restarts it when it dies (`restarts` times), with growing pauses, at the same
    `url`; where it was given up, `failure` says why. After a restart it serves its original
    weights; use `on_up` to hand over newer ones.
    """

    def __init__(
        self,
        config: ServerConfig,
        log: Callable[[str], None] = print,
        *,
        on_down: Callable[[], None] = lambda: None,
        on_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_down` and `on_up` are called in the thread that watches."""
        self.config, self.name, self.url = config, config.served_name, ""
        self.failure = ""
        self._log, self._on_down, self._on_up = log, on_down, on_up
        self._closing = contextlib.ExitStack()
        self._socket = Path()
        self._written = ServerLog(Path(config.log).expanduser().absolute())
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Server:
        if self._stopping.is_set():
            raise InputError("the server of config.llm.server was stopped before it had started.")
        self._socket = self._closing.enter_context(weights_folder()) / "vllm.sock"
        self.url = f"{UNIX}{self._socket}"
        try:
            self._launch()
        except BaseException:
            self._end()
            raise
        self._thread = threading.Thread(target=self._watch, name="vllm-watch", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stops the server: SIGTERM, SIGKILL after `stop_grace`. A second call does nothing."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()  # it may be in the middle of a restart
            self._thread = None
        self._end()
        self._closing.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    # ---------------------------------------------------------------- one process

    def _launch(self) -> None:
        self._socket.unlink(missing_ok=True)  # that of the process before: vLLM takes none
        guard = [sys.executable, "-I", watchdog.__file__, str(self.config.stop_grace)]
        try:
            self._written.path.parent.mkdir(parents=True, exist_ok=True)
            with self._written.path.open("ab") as log:
                log.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} start\n".encode())
                log.flush()
                self._written.start = log.tell()
                self._process = subprocess.Popen(  # noqa: S603  (a list, no shell)
                    [*guard, *self.config.command(self._socket)],
                    stdin=subprocess.PIPE,  # closed by us, or at our death: watchdog stops
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.config.environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise InputError(
                f"config.llm.server.log: {self._written.path}: {error.strerror}."
            ) from error
        self._await_ready(self._process)

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        began = logged = time.monotonic()
        endpoint = Endpoint(self.url)
        while not self._stopping.is_set():
            if _ended(process):
                raise InputError(f"vLLM died at start; {self._written.last_words()}")
            now = time.monotonic()
            # The server must be healthy, and the model's name must be among those it serves.
            if endpoint.get("/health").status == 200 and self.name in endpoint.model_names():
                self._log(f"vLLM serves {self.name} at {self.url} ({now - began:.0f} s).")
                return
            if now - began > self.config.start_timeout:
                raise InputError(
                    f"vLLM did not answer within {self.config.start_timeout:g} s; raise "
                    "config.llm.server.start_timeout if that is too short; "
                    f"{self._written.last_words()}"
                )
            if now - logged >= LOG_EVERY:
                logged, last = now, self._written.tail(1) or ["…"]
                self._log(f"vLLM is starting, {now - began:.0f} s: {last[0]}")
            self._stopping.wait(LOOK_EVERY)
        raise InputError("the server of config.llm.server was stopped while it started.")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        limit = time.monotonic() + self.config.stop_grace + 5.0
        while not _ended(process) and time.monotonic() < limit:
            time.sleep(LOOK_EVERY / 4)
        # The leader was not waited for yet, so no other group can have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Killed processes take a moment to disappear and to free their GPU memory.
        limit = time.monotonic() + 5.0
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < limit:
                os.killpg(process.pid, 0)
                time.sleep(LOOK_EVERY / 4)

    # ---------------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        try:
            self._keep_up()
        except Exception as error:  # nothing else notices if this thread ends
            self._give_up(f"vLLM was given up: {type(error).__name__}: {error}")
            raise

    def _give_up(self, why: str) -> None:
        self.failure = why
        self._log(why)

    def _keep_up(self) -> None:
        attempts, began = 0, time.monotonic()
        while True:
            assert self._process is not None
            while not _ended(self._process):
                if self._stopping.wait(LOOK_EVERY):
                    return
            self._end()
            self._on_down()
            if time.monotonic() - began > HEALTHY_AFTER:
                attempts = 0
            why = "it died"
            while why:
                if attempts >= self.config.restarts:
                    given_up = f"vLLM was given up after {attempts} restarts in a row: {why}"
                    self._give_up(f"{given_up}; see {self._written.path}")
                    return
                pause = min(self.config.backoff * 2**attempts, LONGEST_BACKOFF)
                attempts += 1
                self._log(
                    f"vLLM is down ({why}); restart {attempts} of {self.config.restarts} in "
                    f"{pause:g} s. {self._written.last_words()}"
                )
                if self._stopping.wait(pause):
                    return
                try:
                    self._launch()
                    self._on_up()
                    why = ""
                except Exception as error:  # after a failed hand-over it cannot be trusted
                    self._end()
                    why = str(error).partition("\n")[0] or type(error).__name__
                    if self._stopping.is_set():
                        return
            began = time.monotonic()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended. Unlike `poll`, it does not release the process number."""
    if process.returncode is not None:
        return True
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


LAST_LINES = 15  # shown when the server dies
READ_BYTES = 1 << 16  # at each end of what the present process wrote
LONGEST_ERROR = 600  # characters

# An exception's last line, with or without vLLM's own words before it, such as
# "(EngineCore pid=1) ERROR 11-26 09:10:12 [core.py:1510] ValueError: …".
_ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception|Exit)): (\S.*)")


class ServerLog:
    """The log file of one server; `start` is where the present process began in it, in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0

    def tail(self, count: int) -> list[str]:
        return self._lines(from_end=True)[-count:]

    def last_words(self) -> str:
        error = next(filter(None, map(_ERROR.search, self._lines(from_end=False))), None)
        shown = f"{error[1]}: {error[2]}"[:LONGEST_ERROR] if error else ""
        first = f"the first error in its log is {shown}; " if shown else ""
        lines = "".join(f"\n    {line}" for line in self.tail(LAST_LINES))
        return f"{first}the last lines of its log {self.path}:{lines}"

    def _lines(self, from_end: bool) -> list[str]:
        with contextlib.suppress(OSError), self.path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.start, size - READ_BYTES) if from_end else self.start)
            lines = log.read(READ_BYTES).decode("utf-8", "replace").splitlines()
            return [line.strip() for line in lines if line.strip()]
        return []

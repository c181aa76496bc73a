"""Starts commands fast: forks them from a process that has already imported what they need.

This saves seconds per command. A forked command is a full process: it has its own id, gets signals
and ends with a status. Only its imports, from jax to orbax, are already done. `Forks` is used like
`subprocess.Popen`; `python -m tests.fork_server SOCKET` is the process that it forks from.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Variables that modules read at import: a command must have the same values as the server.
AT_IMPORT = ("JAX_", "PYTHON", "LD_", "XLA_PYTHON", "HF_", "TF_", "OMP_", "OPENBLAS_")


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, args: list[str], connection: socket.socket, out: int, err: int) -> None:
        self.args, self._connection = args, connection
        self.stdout: Any = os.fdopen(out, encoding="utf-8")
        self.stderr: Any = os.fdopen(err, encoding="utf-8")
        self._told = connection.makefile("r", encoding="utf-8")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        line = self._told.readline()
        status = int(line) if line else -signal.SIGKILL  # the server itself was killed
        self.returncode = os.waitstatus_to_exitcode(status) if line else status
        self._connection.close()
        self._ended.set()

    def poll(self) -> int | None:
        """The exit status; None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process; returns its exit status."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end of the process; returns the rest of its output and of its errors."""
        texts = ["", ""]

        def read(place: int, stream: Any) -> None:
            with contextlib.suppress(ValueError):  # closed by another call
                texts[place] = stream.read()

        threads = [
            threading.Thread(target=read, args=pair, daemon=True)
            for pair in enumerate((self.stdout, self.stderr))
        ]
        for thread in threads:
            thread.start()
        ends = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.join(None if ends is None else max(ends - time.monotonic(), 0))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if ends is None else max(ends - time.monotonic(), 1))
        return texts[0], texts[1]

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *error: Any) -> None:
        for stream in (self.stdout, self.stderr):
            stream.close()
        self.wait()


class Forks:
    """Starts commands through a fork server, which starts at its first use.

    Args:
        folder: folder of the server's socket.
        environment: environment of the server.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"forks-{os.getpid()}"
        self._environment = environment
        self._server: subprocess.Popen[bytes] | None = None

    def can(self, environment: dict[str, str]) -> bool:
        """Whether a command with this environment can be forked."""
        own = self._environment
        return hasattr(os, "fork") and all(
            own.get(name) == environment.get(name)
            for name in own.keys() | environment.keys()
            if name.startswith(AT_IMPORT)
        )

    def start(self, module: str, arguments: list[str], cwd: Path, environment: dict[str, str]):
        """Starts `python -m MODULE ARGUMENTS`; returns its process."""
        self._await_server()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._path))
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        asked = {"module": module, "arguments": arguments, "cwd": str(cwd), "env": environment}
        text = json.dumps(asked).encode() + b"\n"
        ends = array.array("i", [out_end, err_end])
        connection.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
        connection.sendall(text)
        os.close(out_end)
        os.close(err_end)
        words = [sys.executable, "-m", module, *arguments]
        return ForkedProcess(words, connection, out, err)

    def stop(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def _await_server(self) -> None:
        if self._server is None:
            words = [sys.executable, "-m", "tests.fork_server", str(self._path)]
            self._server = subprocess.Popen(words, cwd=ROOT, env=self._environment)
        ends = time.monotonic() + 120
        while not self._path.exists():
            assert self._server.poll() is None, "the server that commands are forked from died"
            assert time.monotonic() < ends
            time.sleep(0.01)


def serve(path: str) -> tuple[str, list[str]] | None:
    """Forks until its parent ends; in a forked process, returns the module and its arguments."""
    import_all()
    parent = os.getppid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(16)
    os.rename(path + ".new", path)
    while os.getppid() == parent:
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        connection, _ = listener.accept()
        _, rights, *_ = connection.recvmsg(1, socket.CMSG_SPACE(8))
        ends = array.array("i", rights[0][2][:8])
        with connection.makefile("r", encoding="utf-8") as lines:
            asked = json.loads(lines.readline())
        pid = os.fork()
        if pid == 0:
            listener.close()
            connection.close()
            for number, end in enumerate(ends, 1):
                os.dup2(end, number)
                os.close(end)
            os.chdir(asked["cwd"])
            os.environ.clear()
            os.environ.update(asked["env"])
            return asked["module"], asked["arguments"]
        for end in ends:
            os.close(end)
        connection.sendall(f"{pid}\n".encode())
        threading.Thread(target=_tell_end, args=(pid, connection), daemon=True).start()
    return None


def _tell_end(pid: int, connection: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError), connection:
        connection.sendall(f"{status}\n".encode())


def import_all() -> None:
    """Imports the modules that commands import, except those that define flags."""
    import matplotlib.figure  # noqa: F401
    from absl import app  # noqa: F401
    from ml_collections import config_flags  # noqa: F401
    from scipy import stats  # noqa: F401

    import qrag_jax.evaluators.answer_run
    import qrag_jax.llm.client.client
    import qrag_jax.metrics.stopping
    import qrag_jax.systems.length_scores
    import qrag_jax.systems.q_rag
    import qrag_jax.systems.scoring
    import qrag_jax.systems.towers_export  # noqa: F401
    from qrag_jax.runtime.writers import _summary_writer

    _summary_writer()


if __name__ == "__main__":
    found = serve(sys.argv[1])
    if found is not None:
        name, words = found
        sys.argv = [name, *words]
        runpy.run_module(name, run_name="__main__", alter_sys=True)

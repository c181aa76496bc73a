"""Starts commands as processes that are forked from one which has already imported jax.

This saves seconds for each. The process is a full one: it has its own id, takes signals and ends
with a status.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

# Variables that modules read at import: a command must have the values of the server.
AT_IMPORT = ("JAX_", "PYTHON", "LD_", "XLA_PYTHON", "HF_", "TF_", "OMP_", "OPENBLAS_")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.command_imports"])


class Forked:
    """A command; the part of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, words: Sequence[str], cwd: Path, env: Mapping[str, str]):
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        ends = [Connection(end, readable=False) for end in (out_end, err_end)]
        self.args = [sys.executable, "-m", module, *words]
        self._process = _CONTEXT.Process(target=_run, args=(module, words, str(cwd), env, *ends))
        with mock.patch.dict(os.environ, env, clear=True):  # the first one starts the server
            self._process.start()
        atexit.register(self.kill)  # else a test that failed would leave it, and be waited for
        for end in ends:
            end.close()
        self.stdout: Any = os.fdopen(out, encoding="utf-8")
        self.stderr: Any = os.fdopen(err, encoding="utf-8")
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end; returns the rest of its output and of its errors."""
        texts = ["", ""]

        def read(place: int, stream: Any) -> None:
            with contextlib.suppress(ValueError):  # closed by another call
                texts[place] = stream.read()

        pairs = enumerate((self.stdout, self.stderr))
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in pairs]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts[0], texts[1]

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: Any) -> None:
        for stream in (self.stdout, self.stderr):
            stream.close()
        self.wait()


def _run(
    module: str, words: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection
) -> None:
    """In the new process: becomes the command, as `python -m MODULE` would be."""
    # Multiprocessing passes over an ImportError there, and every command would import all again.
    assert "tests.support.command_imports" in sys.modules
    for number, end in enumerate((out, err), 1):
        os.dup2(end.fileno(), number)
        end.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of Python
        atexit._run_exitfuncs()

"""Serves a language model to trainers on other terminals, until it is stopped.

    python -m qrag_jax.serve_llm --config=configs/quickstart.py --config.llm.server.model=FOLDER

A trainer without --config.llm.url starts its own server instead.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.llm.config import LlmConfig, ServerConfig
from qrag_jax.llm.server.opening import server_of, started
from qrag_jax.llm.server.server import Server
from qrag_jax.runtime import commandline
from qrag_jax.runtime.config_fields import fill
from qrag_jax.runtime.interrupt import LOOK_EVERY, Stopped, StopSignal
from qrag_jax.systems import run_flags

CONFIG = run_flags.define_experiment()


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(server: Server) -> int:
    """Keeps the server up until SIGTERM or Ctrl-C; returns the exit status."""
    with StopSignal() as stop, started(server) as wait, contextlib.suppress(Stopped):
        wait(stop)
        # The one line on standard output, for scripts.
        model = shlex.quote(f"--config.llm.model={server.name}")
        print(f"--config.llm.url={server.url} {model}", flush=True)
        while not server.failure:
            stop.check()
            time.sleep(LOOK_EVERY)
        return 1
    _log("stopped")
    return 0


def main() -> int:
    llm = run_flags.given_experiment(CONFIG).llm
    if llm.url:
        raise InputError(f"--config.llm.url={llm.url} names a server that is there already.")
    config = LlmConfig(
        model=llm.model,
        server=fill(ServerConfig, llm.server, "llm.server"),
    ).asked("qrag serve_llm")
    server = server_of(config, Path(), log=_log)
    assert isinstance(server, Server)
    return serve(server)


if __name__ == "__main__":
    commandline.run(main)

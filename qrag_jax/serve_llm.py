"""Serves a language model to trainers on other terminals, until it is stopped.

    python -m qrag_jax.serve_llm --config=configs/quickstart.py --config.llm.server.model=FOLDER

A trainer without --config.llm.url starts its own server instead.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from qrag_jax.errors import InputError
from qrag_jax.llm.config import LlmConfig, ServerConfig
from qrag_jax.llm.server.opening import server_of
from qrag_jax.llm.server.server import Server
from qrag_jax.runtime import commandline
from qrag_jax.runtime.config_fields import fill
from qrag_jax.systems import run_flags

CONFIG = run_flags.define_experiment()
LOOK_EVERY = 0.5  # seconds


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(server: Server) -> int:
    """Keeps the server up until SIGTERM or Ctrl-C; returns the exit status."""
    asked: list[int] = []  # a signal handler must not set an Event that its own thread waits for

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1 or not server.alive():
            raise KeyboardInterrupt  # the server is still starting, or it hangs

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    status = 0
    try:
        with server:
            # The one line on standard output, for scripts.
            model = shlex.quote(f"--config.llm.model={server.name}")
            print(f"--config.llm.url={server.url} {model}", flush=True)
            while not asked:
                if server.failure:
                    return 1
                time.sleep(LOOK_EVERY)
    except KeyboardInterrupt:
        status = 130
    _log("stopped")
    return status


def main() -> int:
    llm = run_flags.given_experiment(CONFIG).llm
    if llm.url:
        raise InputError(f"--config.llm.url={llm.url} names a server that is there already.")
    config = LlmConfig(
        model=llm.model,
        api_key_env=llm.api_key_env,
        server=fill(ServerConfig, llm.server, "llm.server"),
    ).asked("qrag serve_llm")
    server = server_of(config, Path(), log=_log)
    assert isinstance(server, Server)
    return serve(server)


if __name__ == "__main__":
    commandline.run(main)

"""Serves a language model to trainers on other terminals, until it is stopped.

    qrag serve_llm --config=configs/quickstart.py --config.llm.server.model=FOLDER

A trainer without --config.llm.url starts its own server instead.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from functools import partial
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.llm.config import LlmConfig, ServerConfig
from qrag_jax.llm.server.server import open_server
from qrag_jax.runtime import commandline, interrupt
from qrag_jax.runtime.config_fields import check_value
from qrag_jax.systems import run_flags

CONFIG = run_flags.define_experiment()


def main() -> int:
    llm = run_flags.given_experiment(CONFIG).llm
    if llm.url:
        raise InputError(f"--config.llm.url={llm.url} names a server that is there already.")
    server = check_value(ServerConfig, llm.server, "config.llm.server")
    config = LlmConfig(model=llm.model, server=server).asked("qrag serve_llm")
    log, status = partial(print, file=sys.stderr, flush=True), 130
    with (
        interrupt.StopSignal() as stop,
        contextlib.suppress(interrupt.Stopped),
        open_server(config, Path(), log=log) as server,
    ):
        server.wait(stop.check)
        status = 0
        # The one line on standard output, for scripts.
        model = shlex.quote(f"--config.llm.model={server.name}")
        print(f"--config.llm.url={server.url} {model}", flush=True)
        while not server.failure:
            stop.check()
            time.sleep(interrupt.LOOK_EVERY)
        return 1
    log("stopped")
    return status


if __name__ == "__main__":
    commandline.run(main)

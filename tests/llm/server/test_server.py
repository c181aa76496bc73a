"""The life of a server, with a small real process in vLLM's place (see test_sidecar for vLLM)."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import LlmConfig, ServerConfig
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.server.server import LAST_LINES, Existing, Server, ServerLog, open_server
from tests.entry_points import ROOT, wait_until
from tests.llm.model_server import chat, texts
from tests.llm.stand_in import StandIn, running


@pytest.fixture
def config(stand_in: StandIn, model_folder: Path, tmp_path: Path) -> ServerConfig:
    return ServerConfig(
        str(model_folder),
        python=str(stand_in.python),
        log=str(tmp_path / "logs" / "vllm.log"),
        start_timeout=30.0,
        stop_grace=1.0,
        backoff=0.1,
    )


def test_only_this_user_reaches_its_socket_and_nothing_is_left(
    config: ServerConfig, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DELAY", "0.6")
    monkeypatch.setattr("qrag_jax.llm.server.server.LOG_EVERY", 0.2)
    said: list[str] = []
    with Server(config, log=said.append) as server:
        server.wait()
        socket_file = Path(server.url.removeprefix("unix:"))
        assert socket_file.is_socket()
        assert socket_file.parent.stat().st_mode & 0o777 == 0o700
        with Client(LlmConfig(server.url, "little").client(server.url, "little")) as client:
            assert texts(client.ask_blocking([chat("whose?")])) == ["ours"]
    assert not socket_file.parent.exists()
    assert len(stand_in.starts()) == 1
    assert not any(map(running, stand_in.pids()))
    assert server.failure == ""
    assert any("loading the weights" in line for line in said)
    assert "loading the weights" in Path(config.log).read_text()


def test_one_that_is_running_already(config: ServerConfig, tmp_path: Path) -> None:
    with Server(config, log=lambda line: None) as own:
        own.wait()
        assert Endpoint(own.url).model_names() == ("little",)
        with open_server(LlmConfig(own.url, "little"), tmp_path) as server:
            assert server == Existing(own.url, "little")
        assert Endpoint(own.url).model_names()  # it is left as it is
        with (
            pytest.raises(InputError, match="'large'"),
            open_server(LlmConfig(own.url, "large"), tmp_path),
        ):
            pass
    with (
        pytest.raises(InputError, match=r"config\.llm\.url"),
        open_server(LlmConfig(own.url, "little"), tmp_path),
    ):
        pass


def test_one_that_will_not_stop(
    config: ServerConfig, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "stubborn")
    with Server(config, log=lambda line: None) as server:
        server.wait()
        assert len(stand_in.pids()) == 2
        began = time.monotonic()
    assert 1.0 <= time.monotonic() - began < 6.0
    assert not any(map(running, stand_in.pids()))


@pytest.mark.parametrize(("mode", "why"), [("dies", "weights are broken"), ("hangs", "within 1 s")])
def test_one_that_does_not_start(
    mode: str, why: str, config: ServerConfig, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", mode)
    Path(config.log).parent.mkdir(exist_ok=True)
    Path(config.log).write_text("a line of an earlier run\n")
    seconds = 1.0 if mode == "hangs" else 30.0
    with (
        Server(dataclasses.replace(config, start_timeout=seconds), print) as server,
        pytest.raises(InputError) as caught,
    ):
        server.wait()
    assert not any(map(running, stand_in.pids()))
    text = str(caught.value)
    assert why in text
    assert config.log in text
    assert "earlier run" not in text


@pytest.mark.parametrize("victim", ["server", "watchdog"])
def test_a_killed_one_is_restarted(victim: str, config: ServerConfig, stand_in: StandIn) -> None:
    calls: list[str] = []
    server = Server(
        config,
        log=lambda line: None,
        on_down=lambda: calls.append("down"),
        on_up=lambda: calls.append("up"),
    )
    with server:
        server.wait()
        url, (first,) = server.url, stand_in.pids()
        parent = Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(first if victim == "server" else int(parent), signal.SIGKILL)
        wait_until(lambda: calls == ["down", "up"])
        assert server.url == url
        assert Endpoint(url).model_names() == ("little",)
        second = stand_in.pids()[1]
        assert running(second)
        assert not running(first)
    assert calls == ["down", "up"]
    assert not any(map(running, stand_in.pids()))


def test_one_that_keeps_dying_is_abandoned(
    config: ServerConfig, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "dies again")
    with Server(dataclasses.replace(config, restarts=2), log=lambda line: None) as server:
        server.wait()
        os.kill(stand_in.pids()[0], signal.SIGKILL)
        wait_until(lambda: server.failure)
        assert "died at start" in server.failure
        assert config.log in server.failure
    assert len(stand_in.starts()) == 3
    assert not any(map(running, stand_in.pids()))


TRAINER = """
import os, sys, time
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.config import ServerConfig
config = ServerConfig(sys.argv[1], python=sys.argv[2], log=sys.argv[3], stop_grace=1.0)
server = Server(config, log=lambda line: None).__enter__()
server.wait()
if sys.argv[4] == "leaves":
    sys.exit(3)
if os.fork() == 0:
    time.sleep(600)  # holds every open file of the trainer, and outlives it
print("forked", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["forked", "leaves"])
def test_it_does_not_outlive_the_trainer(end: str, config: ServerConfig, stand_in: StandIn) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, config.model, config.python, config.log, end],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    try:
        trainer.stdout.readline()
        if end == "forked":
            assert running(stand_in.pids()[0])
            trainer.kill()
        assert trainer.wait(20) == (3 if end == "leaves" else -signal.SIGKILL)
        wait_until(lambda: not any(map(running, stand_in.pids())))
    finally:
        if end == "forked":
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.stdout.close()


def test_the_command(config: ServerConfig, stand_in: StandIn, tmp_path: Path) -> None:
    command = [
        str(ROOT / "launch" / "sidecar.sh"),
        f"--config.llm.server.model={config.model}",
        f"--config.llm.server.python={config.python}",
        f"--config.llm.server.log={config.log}",
        "--config.llm.model=judge",
        "--config.llm.server.arguments=('--seed', '7')",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "QRAG_PYTHON": sys.executable},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("--config.llm.url=unix:/")
    assert line.endswith(".sock --config.llm.model=judge\n")
    assert stand_in.starts()[0]["argv"][3:5] == ["--seed", "7"]
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert not any(map(running, stand_in.pids()))


def test_messages_have_the_first_error_and_the_last_lines_of_its_log(tmp_path: Path) -> None:
    path, cause = tmp_path / "vllm.log", "ValueError: Available memory (8.01 GiB) is too little"
    lines = ["Traceback (most recent call last):", f"(EngineCore pid=2) ERROR [core.py] {cause}"]
    lines += [*(f'  File "core.py", line {n}, in start' for n in range(3 * LAST_LINES)), "the last"]
    path.write_text("".join(f"{line}\n" for line in lines))
    words = ServerLog(path).last_words()
    assert cause in words
    assert words.endswith("the last")

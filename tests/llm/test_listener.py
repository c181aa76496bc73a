"""Whose server it is: another process on the port gets no key and no question."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm import listener
from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.listener import NotOurs, described, family, held_by, listeners
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.server.server_config import ServerConfig
from tests.llm.asking import chat, texts
from tests.llm.foreign import Foreign
from tests.llm.stand_in import StandIn, running, wait_until

KEY = "a-secret-of-the-test"


@pytest.fixture
def config(
    stand_in: StandIn, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ServerConfig:
    monkeypatch.setenv("SOME_KEY", KEY)
    return ServerConfig(
        str(model_folder),
        python=str(stand_in.python),
        log=str(tmp_path / "vllm.log"),
        api_key_env="SOME_KEY",
        start_timeout=30.0,
        stop_grace=1.0,
        backoff=1.0,
    )


def changed(config: ServerConfig, **changes: object) -> ServerConfig:
    return ServerConfig(**{**vars(config), **changes})


def client_of(server: Server) -> Client:
    fields = {"retry_pause": 0.01, "wait_limit": 20.0}
    config = ClientConfig(server.url, "little", api_key_env="SOME_KEY", **fields)  # type: ignore[arg-type]
    return Client(config, print, server)


class Thief:
    """Takes the port of each of the first `ports` processes before it is listened on."""

    def __init__(self, stand_in: StandIn, ports: int) -> None:
        self.caught: list[Foreign] = []
        self._stand_in, self._ports, self._stop = stand_in, ports, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop and len(self.caught) < self._ports:
            for start in self._stand_in.starts()[len(self.caught) :]:
                port = int(start["argv"][start["argv"].index("--port") + 1])
                self.caught.append(Foreign("little", port))
            time.sleep(0.01)

    def __enter__(self) -> Thief:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._thread.join()
        for each in self.caught:
            each.close()


def test_a_port_taken_between_our_choice_and_the_start(
    config: ServerConfig, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DELAY", "1")
    said: list[str] = []
    with Thief(stand_in, 1) as thief, Server(config, log=said.append) as server:
        (foreign,) = thief.caught
        assert server.url != f"http://127.0.0.1:{foreign.port}/v1"
        assert foreign.headers == []
        with client_of(server) as client:
            assert texts(client.ask_blocking([chat("whose?")])) == ["ours"]
    assert any(f"process {os.getpid()} (" in line and "another port" in line for line in said)


def test_a_fixed_port_taken_after_our_look_is_refused(
    config: ServerConfig, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DELAY", "1")
    port = free_port()
    server = Server(changed(config, port=port), log=print)
    with Thief(stand_in, 1) as thief:
        with pytest.raises(InputError, match=rf"port: process {os.getpid()} \(.*listens on {port}"):
            server.start()
        assert thief.caught[0].headers == []
    assert not any(map(running, stand_in.pids()))


def test_a_port_taken_before_is_refused_with_who_has_it(config: ServerConfig) -> None:
    with Foreign("little") as foreign:
        with pytest.raises(InputError, match=rf"process {os.getpid()} \(.*\) listens there"):
            Server(changed(config, port=foreign.port)).start()
        assert foreign.headers == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_port_taken_while_our_server_was_down(config: ServerConfig, stand_in: StandIn) -> None:
    said: list[str] = []
    with Server(config, log=said.append) as server, client_of(server) as client:
        assert texts(client.ask_blocking([chat("before")])) == ["ours"]
        url, port = server.url, int(server.url.split(":")[2].removesuffix("/v1"))
        os.kill(stand_in.pids()[0], signal.SIGKILL)
        wait_until(lambda: not server.alive())
        with Foreign("little", port) as foreign:
            asked = client.submit([chat("meanwhile")])
            with pytest.raises(NotOurs, match=f"process {os.getpid()} "):
                server.check()
            assert texts(asked.result(30)) == ["ours"]
            assert server.restarts == 1
            assert server.url != url
            assert Endpoint(url, KEY, own=server).model_names() == ("little",)
            assert texts(client.ask_blocking([chat("after")])) == ["ours"]
            assert not foreign.saw(KEY)
            assert foreign.headers == []
    moved = f"starts at {server.url} instead"
    assert any("listens there" in line and moved in line for line in said)


@pytest.mark.parametrize("fixed", ["by the config", "by those who know it"])
def test_a_server_that_may_not_move_is_given_up(
    fixed: str, config: ServerConfig, stand_in: StandIn
) -> None:
    port = free_port() if fixed == "by the config" else 0
    made = changed(config, port=port, restarts=1, backoff=0.5)
    with Server(made, log=print, may_move=bool(port)) as server:
        port = int(server.url.split(":")[2].removesuffix("/v1"))
        with client_of(server) as client:
            client.ask_blocking([chat("before")])
            os.kill(stand_in.pids()[0], signal.SIGKILL)
            wait_until(lambda: not server.alive())
            with Foreign("little", port) as foreign:
                asked = client.submit([chat("meanwhile")])
                wait_until(lambda: server.failure)
                assert f"port: {port} on 127.0.0.1 cannot be taken" in server.failure
                assert f"process {os.getpid()} (" in server.failure
                assert not asked.done()
                asked.cancel()
                assert foreign.headers == []


def test_a_client_asks_only_over_connections_to_our_server(
    config: ServerConfig, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would take another port to be seen: that there is none is no proof that it cannot be.
    with Server(config, log=print) as server, Foreign("little") as foreign:
        monkeypatch.setattr(server, "_port", foreign.port)
        fields = {"wait_limit": 0.3}
        made = ClientConfig(server.url, "little", api_key_env="SOME_KEY", **fields)  # type: ignore[arg-type]
        with Client(made, print, server) as client:
            (failure,) = client.ask_blocking([chat("whose?")])
        assert isinstance(failure, Failure)
        assert failure.cause == "connection"
        assert foreign.headers == []
        reply = Endpoint(server.url, KEY, own=server).post("/v1/load_lora_adapter", {})
        assert reply.status == 0
        assert "is not the vLLM that was started" in reply.reason
        assert foreign.headers == []


class Swapped:
    """Proof of a server that is replaced between the look before a connection and the one after."""

    def __init__(self, url: str) -> None:
        self.url, self.looks = url, 0

    def check(self) -> tuple[int, ...]:
        self.looks += 1
        return (self.looks,)


def test_a_listener_that_is_replaced_in_the_middle_is_sent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    with Foreign("little") as foreign:
        own = Swapped(f"http://127.0.0.1:{foreign.port}/v1")
        assert "another server began" in Endpoint(own.url, KEY, own=own).get("/health").reason
        made = ClientConfig(own.url, "little", wait_limit=0.1, api_key_env="SOME_KEY")
        with Client(made, print, own) as client:
            (failure,) = client.ask_blocking([chat("whose?")])
        assert isinstance(failure, Failure)
        assert own.looks >= 4
        assert foreign.headers == []


@pytest.mark.parametrize("key", ["SOME_KEY", ""])
def test_a_system_that_does_not_tell(
    key: str, config: ServerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PROC", tmp_path / "nothing")
    said: list[str] = []
    server = Server(changed(config, api_key_env=key), log=said.append)
    if key:
        with pytest.raises(InputError, match="api_key_env"):
            server.start()
    else:
        with server:
            assert server.check() == ()
            assert Endpoint(server.url, own=server).model_names() == ("little",)
        assert "does not tell which process listens" in said[0]


BOUND = [
    (socket.AF_INET, "127.0.0.1", True),
    (socket.AF_INET, "0.0.0.0", True),  # noqa: S104
    (socket.AF_INET, "127.0.0.2", False),
    (socket.AF_INET6, "::", True),
    (socket.AF_INET6, "::ffff:127.0.0.1", True),
    (socket.AF_INET6, "::1", False),
]


@pytest.fixture(params=BOUND, ids=[address for _, address, _ in BOUND])
def bound(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, bool]]:
    kind, address, reaches = request.param
    with socket.socket(kind) as made:
        try:
            made.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        made.listen()
        yield made, reaches


def test_who_listens(bound: tuple[socket.socket, bool]) -> None:
    made, reaches = bound
    port = made.getsockname()[1]
    found = listeners(port)
    assert bool(found) is reaches
    if found:
        ((inode, uid),) = found
        assert inode == os.fstat(made.fileno()).st_ino
        assert uid == os.getuid()
        assert held_by(inode, [os.getpid()]) == Path(f"/proc/{os.getpid()}/fd/{made.fileno()}")
        assert described(port).startswith(f"process {os.getpid()} (")
    made.close()
    assert listeners(port) == []
    assert described(port) == ""


def test_two_that_share_a_port_are_both_seen() -> None:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", 0))
        other.bind(one.getsockname())
        one.listen()
        other.listen()
        assert len(listeners(one.getsockname()[1])) == 2


def test_a_family_holds_the_children_of_children() -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(p.pid, flush=True); p.wait()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert set(family(parent.pid)) == {parent.pid, child}
    assert {parent.pid, child} < set(family(os.getpid()))
    parent.communicate("\n")

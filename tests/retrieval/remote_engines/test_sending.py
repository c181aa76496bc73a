"""One request: what arrives, what comes back, and how it ends where nothing good comes back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines import sending
from qrag_jax.retrieval.remote_engines.sending import GET, POST, Received, Request, Sender
from tests.retrieval.remote_engines.scripted import KEY, Call, Say, serving

NASTY = (
    "a&retmax=0#",
    "x=1&api_key=mine;y",
    "50% of +plus+ and %20",
    'say "quoted" AND (a OR b)[tiab]',
    "line\r\nHost: elsewhere\n\ttab",
    "Sjögren’s β-blocker 百 🙂",
    "back\\slash ? / : @ \0",
)


def send(url: str, method: str = POST, timeout: float = 5.0, key: str = "") -> Received | Failure:
    return Sender(url, timeout, key).send(Request(method, "/path", {"term": "x"}))


def failure(outcome: Received | Failure) -> Failure:
    assert isinstance(outcome, Failure), outcome
    return outcome


@contextlib.contextmanager
def talking(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server below HTTP; the address of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    talk(connection)
                    # What is not read when a connection is closed would reset it at the other end.
                    connection.settimeout(5)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
    thread.join(5)


@pytest.mark.parametrize("method", [GET, POST])
@pytest.mark.parametrize("query", NASTY)
def test_fields_arrive_as_they_are(method: str, query: str) -> None:
    fields = {"term": query, "retmax": "7"}
    with serving(lambda call: Say("well")) as server:
        got = Sender(server.url + "/api", 5.0, KEY).send(Request(method, "/path", fields))
    assert isinstance(got, Received)
    assert got.text == "well"
    (call,) = server.calls
    secret = {"api_key": KEY} if method == POST else {}
    assert dict(call.fields) == fields | secret
    assert call.path == "/api/path"
    assert KEY not in call.target


def test_a_down_service_is_no_connection() -> None:
    with serving(lambda call: Say()) as server:
        pass
    assert failure(send(server.url)).cause == "connection"


def test_a_closed_connection_is_no_answer() -> None:
    with serving(lambda call: Say(drop=True)) as server:
        assert failure(send(server.url)).cause == "connection"


def test_half_an_answer_is_none() -> None:
    with serving(lambda call: Say('{"a": 1}', missing=1)) as server:
        failed = failure(send(server.url))
    assert (failed.cause, "lacks its last 1 bytes" in failed.message) == ("malformed", True)


def test_half_a_chunk_is_no_answer() -> None:
    def talk(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n[1, 2")

    with talking(talk) as address:
        assert failure(send(f"http://{address}")).cause == "malformed"


def test_what_is_no_http_is_no_answer() -> None:
    def talk(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"SSH-2.0-x\r\n")

    with talking(talk) as address:
        assert failure(send(f"http://{address}")).cause == "malformed"


@pytest.mark.parametrize("part", [b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_bytes_that_drip_do_not_begin_the_time_anew(part: bytes) -> None:
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(part)
        while not over.wait(0.03):
            connection.sendall(b"x")

    with talking(talk) as address:
        began = time.monotonic()
        failed = failure(send(f"http://{address}", timeout=0.2))
        took = time.monotonic() - began
        over.set()
    assert (failed.cause, failed.message) == ("timeout", "no whole answer within 0.2 s")
    assert 0.15 < took < 2.0


def test_silence_is_a_timeout() -> None:
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        over.wait(5)

    with talking(talk) as address:
        assert failure(send(f"http://{address}", timeout=0.1)).cause == "timeout"
        over.set()


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "LONGEST_REPLY", 1000)
    with serving(lambda call: Say("x" * int(call.fields["n"]))) as server:
        sender = Sender(server.url, 5.0)
        whole = sender.send(Request(GET, "/", {"n": "1000"}))
        failed = failure(sender.send(Request(GET, "/", {"n": "1001"})))
    assert isinstance(whole, Received)
    assert len(whole.text) == 1000
    assert (failed.cause, "longer than" in failed.message) == ("malformed", True)


def test_a_packed_answer_is_refused() -> None:
    with serving(lambda call: Say("x", headers={"Content-Encoding": "gzip"})) as server:
        assert "packed" in failure(send(server.url)).message
    assert server.calls[0].headers["Accept-Encoding"] == "identity"


def test_a_redirect_is_not_followed() -> None:
    with serving(lambda call: Say("caught")) as other:

        def elsewhere(call: Call) -> Say:
            return Say(status=307, headers={"Location": f"{other.url}/path"})

        with serving(elsewhere) as server:
            got = send(server.url, key=KEY)
    assert isinstance(got, Received)
    assert (got.status, got.headers["location"]) == (307, f"{other.url}/path")
    assert other.calls == []


def test_an_answer_that_repeats_the_key_is_blotted() -> None:
    with serving(lambda call: Say(f"key {call.fields['api_key']} is bad", status=400)) as server:
        got = send(server.url, key=KEY)
    assert isinstance(got, Received)
    assert got.text == "key [the API key] is bad"


def test_a_key_goes_to_no_other_machine_unencrypted() -> None:
    Sender("http://elsewhere.invalid", 1.0)
    Sender("https://elsewhere.invalid", 1.0, KEY)
    for url, key in (("http://elsewhere.invalid", KEY), ("https://elsewhere.invalid", KEY[:15])):
        with pytest.raises(InputError) as told:
            Sender(url, 1.0, key)
        assert key not in str(told.value)
        assert "elsewhere.invalid" in str(told.value)


def test_a_proxy_sees_a_host_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[bytes]()

    def talk(connection: socket.socket) -> None:
        heard.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 403 No\r\n\r\n")

    with talking(talk) as address:
        monkeypatch.setenv("https_proxy", f"http://user:p%40ss@{address}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        failed = failure(send("https://eutils.invalid", timeout=2.0, key=KEY))
    assert failed.cause == "connection"
    head = heard[0].decode().split("\r\n")
    assert head[0].startswith("CONNECT eutils.invalid:443 ")
    assert "Proxy-Authorization: Basic dXNlcjpwQHNz" in head  # user:p@ss
    assert KEY not in heard[0].decode()


def test_a_server_on_this_machine_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(lambda call: Say("well")) as server:
        assert isinstance(send(server.url), Received)

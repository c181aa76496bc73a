"""What a server says of the API key reaches no message; a reply that was cut off is none."""

from __future__ import annotations

import socket
import threading
from typing import Any

from qrag_jax.llm.endpoint import Endpoint
from tests.json_server import Call, listening

KEY = "sk-of-a-test-0123456789"


def test_a_key_that_is_repeated_is_blotted_out() -> None:
    """A short one may be a word of the answer."""

    def repeats(call: Call) -> tuple[int, Any]:
        return 401, {"error": f"you sent {call.headers['Authorization']}"}

    with listening(repeats) as url:
        reply = Endpoint(url, KEY).get("/v1/models")
        assert Endpoint(url, "sk-3").get("/v1/models").json == {"error": "you sent Bearer sk-3"}
    assert reply.json == {"error": "you sent Bearer [the API key]"}
    assert KEY not in reply.reason
    reply = Endpoint("http://127.0.0.1:9/v1", f"{KEY}\n456").get("/v1/models")
    assert reply.status == 0
    assert KEY not in reply.reason


def test_a_reply_that_was_cut_off_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{"data": []}')

        thread = threading.Thread(target=answer)
        thread.start()
        reply = Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/v1").get("/v1/models")
        thread.join()
    assert reply.status == 0
    assert "received 12 bytes, expected 30" in reply.text

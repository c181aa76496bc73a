"""A real HTTP server on this machine that replies in JSON, as a test wants it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A request.

    path: as it came, with what follows a question mark.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@contextlib.contextmanager
def listening(
    answer: Callable[[Call], Any], port: int | None = None, protocol: str = "HTTP/1.0"
) -> Iterator[str]:
    """A server that answers while the block runs; its URL.

    Args:
        answer: returns status and body, or a function that writes to the handler; it is called by
            several threads.
        protocol: connections of "HTTP/1.1" stay open.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = protocol
        disable_nagle_algorithm = True

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            said = answer(Call(self.command, self.path, self.headers, body))
            if callable(said):
                with contextlib.suppress(ConnectionError):
                    said(self)
                return
            status, value = said
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status == 429:
                self.send_header("Retry-After", "0")
            with contextlib.suppress(ConnectionError):  # the client may be gone
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        do_DELETE = do_GET = do_HEAD = do_PATCH = do_POST = do_PUT = _serve

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 100

    server = Server(("127.0.0.1", port or 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

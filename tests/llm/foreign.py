"""A real HTTP server of somebody else, on a port that our own server was to have: it plays along,
and keeps every header it was sent."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any


class Foreign:
    """Serves `name` on 127.0.0.1:port (0: a free one) from this process, which is not the server's.

    Attributes:
        headers: of all requests so far. port: that it took.
    """

    def __init__(self, name: str, port: int = 0) -> None:
        self.headers: list[dict[str, str]] = []
        foreign = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({"data": [{"id": name}]})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                choice = {"message": {"content": "stolen"}, "finish_reason": "stop"}
                self._reply({"choices": [choice]})

            def _reply(self, body: Any) -> None:
                foreign.headers.append(dict(self.headers))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Foreign:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def saw(self, secret: str) -> bool:
        """Whether a header held it."""
        return any(secret in value for each in self.headers for value in each.values())

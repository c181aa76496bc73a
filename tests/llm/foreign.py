"""A real HTTP server of somebody else, on a port that was meant for our own server.

It replies as our server would, and keeps every header that it receives.
"""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any


class Foreign:
    """Serves `name` on 127.0.0.1:port (0: a free port) from this process, not from our server's.

    Attributes:
        headers: headers of all requests so far.
        port: the port it listens on.
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
        """Whether a header contained the secret."""
        return any(secret in value for each in self.headers for value in each.values())

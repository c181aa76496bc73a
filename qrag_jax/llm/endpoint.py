"""Single HTTP calls to a model server: health, names of its models, hand-over of weights."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any, NamedTuple

from qrag_jax.llm.listener import NotOurs, OwnServer
from qrag_jax.llm.server_url import without_key

LONGEST_REPLY = 16 << 20  # bytes of a body; an answer with log-probabilities has a few thousand


class Reply(NamedTuple):
    """The reply to a call.

    Attributes:
        status: HTTP status; 0 if there is no usable reply: no connection, a timeout, a reply that
            is too long, or a request that cannot be sent.
        text: the body, or the error if the status is 0; without the API key, should it repeat it.
    """

    status: int
    text: str

    @property
    def json(self) -> Any:
        """The parsed body; None if it is not JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    @property
    def reason(self) -> str:
        """One line for an error message: the HTTP status, if any, and the beginning of the text."""
        words = " ".join(self.text.split())[:300]
        return f"HTTP {self.status}: {words}" if self.status else words


class Endpoint:
    """Calls the server at `url`, such as http://127.0.0.1:8000/v1, without retries or proxies.

    If `own` is given (a server that we started), calls go to its current URL, and nothing is sent
    unless that server is proven to listen there.
    """

    def __init__(self, url: str, api_key: str = "", *, own: OwnServer | None = None) -> None:
        self._url, self._own, self._key = url, own, api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str, timeout: float = 5.0) -> Reply:
        """Sends a GET request for a path such as /v1/models; `timeout` in seconds."""
        return self._call("GET", path, None, timeout)

    def post(self, path: str, body: Any = None, timeout: float = 60.0) -> Reply:
        """Sends a POST request with `body` as JSON; `timeout` in seconds."""
        return self._call("POST", path, None if body is None else json.dumps(body), timeout)

    def model_names(self, timeout: float = 5.0) -> tuple[str, ...]:
        """The names of the models served; empty if the server does not answer."""
        models = self.get("/v1/models", timeout).json
        entries = models.get("data") if isinstance(models, dict) else None
        return tuple(
            str(entry["id"]) for entry in entries or () if isinstance(entry, dict) and "id" in entry
        )

    def _call(self, method: str, path: str, body: str | None, timeout: float) -> Reply:
        parts = urllib.parse.urlsplit(self._own.url if self._own else self._url)
        # vLLM's own endpoints, such as /health, are beside /v1 and not below it.
        root = parts.path.rstrip("/").removesuffix("/v1")
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=timeout)
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        try:
            if self._own:
                listens = self._own.check()
                connection.connect()
                if self._own.check() != listens:
                    raise NotOurs("another server began to listen")
            connection.request(method, root + path, body, headers)
            answer = connection.getresponse()
            text = answer.read(LONGEST_REPLY + 1)
            if len(text) > LONGEST_REPLY:
                return Reply(0, f"the reply is longer than {LONGEST_REPLY >> 20} MiB")
            if missing := answer.length:  # of those announced; `read` of so many does not tell
                return Reply(0, f"the reply lacks its last {missing} bytes")
            return Reply(answer.status, without_key(text.decode("utf-8", "replace"), self._key))
        except (OSError, http.client.HTTPException) as error:
            return Reply(0, without_key(f"{type(error).__name__}: {error}", self._key))
        except ValueError:  # a malformed header; it may be the key, so it is not shown
            return Reply(0, "the request cannot be sent: its address or the API key is malformed")
        finally:
            connection.close()

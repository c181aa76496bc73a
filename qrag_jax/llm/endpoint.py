"""Single calls to a server's own endpoints: is it there, what does it serve, take these weights."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any, NamedTuple

from qrag_jax.llm.listener import NotOurs, OwnServer

LONGEST_REPLY = 16 << 20  # bytes of a body; an answer with its log-probabilities has some thousands


class Reply(NamedTuple):
    """What came back.

    Attributes:
        status: HTTP's; 0: no connection, or none in time.
        text: of the body, or of the connection's error.
    """

    status: int
    text: str

    @property
    def json(self) -> Any:
        """The parsed body, None where it is no JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    @property
    def reason(self) -> str:
        """One line for an error message: the status and the beginning of what the server said."""
        words = " ".join(self.text.split())[:300]
        return f"HTTP {self.status}: {words}" if self.status else words


class Endpoint:
    """A server at `url`, such as http://127.0.0.1:8000/v1, asked without retries or proxies.

    With `own`, a server that we started, its present url is asked, and nothing is sent unless it is
    proven to listen there.
    """

    def __init__(self, url: str, api_key: str = "", *, own: OwnServer | None = None) -> None:
        self._url, self._own = url, own
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str, timeout: float = 5.0) -> Reply:
        """GET of a path such as /v1/models; `timeout` in seconds."""
        return self._call("GET", path, None, timeout)

    def post(self, path: str, body: Any = None, timeout: float = 60.0) -> Reply:
        """POST of a path with a body that JSON can say."""
        return self._call("POST", path, None if body is None else json.dumps(body), timeout)

    def model_names(self, timeout: float = 5.0) -> tuple[str, ...]:
        """Names of the models served; none where the server does not answer."""
        models = self.get("/v1/models", timeout).json
        entries = models.get("data") if isinstance(models, dict) else None
        return tuple(
            str(entry["id"]) for entry in entries or () if isinstance(entry, dict) and "id" in entry
        )

    def _call(self, method: str, path: str, body: str | None, timeout: float) -> Reply:
        parts = urllib.parse.urlsplit(self._own.url if self._own else self._url)
        # vLLM's own endpoints stand beside /v1.
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
            return Reply(answer.status, text.decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as error:
            return Reply(0, f"{type(error).__name__}: {error}")
        except ValueError:  # a header that HTTP cannot carry; it may be the key
            return Reply(0, "the request cannot be sent: its address or the API key is malformed")
        finally:
            connection.close()

"""Sends one request to a service; what comes back is bounded in size and in time."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

import qrag_jax
from qrag_jax.errors import InputError
from qrag_jax.llm.client.replies import shorten
from qrag_jax.llm.endpoint import LONGEST_REPLY
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.server_url import is_local

GET, POST = "GET", "POST"
_FORM = "application/x-www-form-urlencoded"
_SHORTEST_KEY = 16  # a shorter one could be part of an honest answer; NCBI's have 36


class Request(NamedTuple):
    """A request, without the key.

    Attributes:
        method: GET sends the fields in the URL, POST as a form.
        path: below the service's URL, such as /studies.
        fields: names and values as they are; they are escaped when they are sent.
    """

    method: str
    path: str
    fields: Mapping[str, str]


class Received(NamedTuple):
    """An answer. Where it repeats the key, the key is blotted out.

    Attributes:
        status: HTTP status.
        text: the body.
        headers: their names are in lower case.
    """

    status: int
    text: str
    headers: Mapping[str, str]


class Sender:
    """Sends requests to one service, each over a connection of its own.

    A redirect is an answer like others and is not followed, so that the key goes nowhere else. The
    environment's proxies are used for https, but not for a server on this machine. Any thread may
    send.

    Args:
        url: of the service; http or https.
        timeout: seconds for a request, from the connection to the last byte.
        key: "" if there is none; it is sent as the field `api_key` of a POST.

    Raises:
        InputError: the key is too short for one, or would go unencrypted over the network.
    """

    def __init__(self, url: str, timeout: float, key: str = "") -> None:
        self._parts = urllib.parse.urlsplit(url)
        self._timeout, self._key = timeout, key
        if key and len(key) < _SHORTEST_KEY:
            raise InputError(
                f"the API key of {self._parts.hostname} has fewer than {_SHORTEST_KEY} characters; "
                "export it again, whole."
            )
        if key and self._parts.scheme != "https" and not is_local(url):
            raise InputError(
                f"the API key would go to {self._parts.hostname} unencrypted; give a URL with "
                "https, or unset the key."
            )

    def send(self, request: Request) -> Received | Failure:
        """The answer, whatever its status, or why there is none."""
        secret = {"api_key": self._key} if self._key and request.method == POST else {}
        form = urllib.parse.urlencode({**request.fields, **secret})
        target, body = self._parts.path + request.path, None
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # a small packed body could expand to a huge one
            "User-Agent": f"qrag_jax/{qrag_jax.__version__}",
        }
        if request.method == POST:
            headers["Content-Type"], body = _FORM, form.encode()
        else:
            target = f"{target}?{form}"
        cut = threading.Event()
        try:
            return self._exchange(request.method, target, body, headers, cut=cut)
        except TimeoutError:
            return self._late()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if cut.is_set():
                return self._late()
            why = shorten(self._without_key(f"{type(error).__name__}: {error}"))
            broken = isinstance(error, OSError)  # also RemoteDisconnected
            return Failure("connection" if broken else "malformed", why)

    def _exchange(
        self,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        cut: threading.Event,
    ) -> Received | Failure:
        connection, began = _connection(self._parts, self._timeout), time.monotonic()
        timer = None
        try:
            connection.connect()
            # A timeout of the socket alone would begin again with each byte.
            left = max(self._timeout - (time.monotonic() - began), 0.0)
            timer = threading.Timer(left, _cut, [connection.sock, cut])
            timer.daemon = True
            timer.start()
            connection.request(method, target, body, dict(headers))
            answer = connection.getresponse()
            data = answer.read(LONGEST_REPLY + 1)
            missing = answer.length or 0  # of the length that was announced
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()
        if len(data) > LONGEST_REPLY:
            return Failure("malformed", f"the answer is longer than {LONGEST_REPLY >> 20} MiB")
        if cut.is_set():
            return self._late()
        if missing:
            return Failure("malformed", f"the answer lacks its last {missing} bytes")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            return Failure("malformed", "the answer is packed, which was not asked for")
        text = data.decode("utf-8", "replace")
        named = {name.lower(): self._without_key(value) for name, value in answer.headers.items()}
        return Received(answer.status, self._without_key(text), named)

    def _late(self) -> Failure:
        return Failure("timeout", f"no whole answer within {self._timeout:.3g} s")

    def _without_key(self, text: str) -> str:
        for form in (self._key, urllib.parse.quote_plus(self._key)):
            text = text.replace(form, "[the API key]") if form else text
        return text


def _cut(sock: socket.socket, cut: threading.Event) -> None:
    """Ends a request that takes too long; whoever waits for its bytes gets none any more."""
    cut.set()
    with contextlib.suppress(OSError):
        # Not `sock.shutdown`: an SSLSocket's own takes the state from under the thread that reads.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _connection(parts: urllib.parse.SplitResult, timeout: float) -> http.client.HTTPConnection:
    if parts.scheme != "https":
        return http.client.HTTPConnection(parts.netloc, timeout=timeout)
    host, proxy = parts.hostname or "", urllib.request.getproxies().get("https", "")
    to = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not to.hostname or is_local(parts.geturl()) or urllib.request.proxy_bypass(host):
        return http.client.HTTPSConnection(parts.netloc, timeout=timeout)
    through = http.client.HTTPSConnection(to.hostname, to.port or 80, timeout=timeout)
    headers = {}
    if to.username is not None:
        pair = ":".join(urllib.parse.unquote(each or "") for each in (to.username, to.password))
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    through.set_tunnel(host, parts.port or 443, headers)
    return through

"""Model servers' addresses and API keys, and single HTTP calls without retries.

An address is http://HOST:PORT/v1, https://…, or unix:/PATH of a Unix socket on this machine.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.errors import InputError

UNIX = "unix:"
LONGEST_REPLY = 16 << 20  # bytes of a body; an answer with log-probabilities has a few thousand
BLOTTED = "[the API key]"
# Many keys are letters and digits alone, some of them small; so a name with small letters is not
# taken, and nothing else repeats what may be the key itself.
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_SHORTEST = 16  # a shorter key could be part of an honest answer


class TooLarge(Exception):
    """A reply is too long or compressed, and is not read to its end."""


def check_url(url: str, field: str, example: str, key: str) -> urllib.parse.SplitResult:
    """The parts of a server's URL, which has a scheme, a host and perhaps a port and a path.

    In errors `field` names the URL, `example` is a usable one, and a key goes through `key` ("":
    the server wants none).
    """
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # for example, the port is not a number
        usable = False
    if not usable or re.search(r"\s", url):
        # The part before an @ may be a password.
        raise InputError(f"{field} is {url.rpartition('@')[2]!r}; give a server such as {example}.")
    if "@" in parts.netloc or parts.query or parts.fragment:
        fix = f"give a key through {key}" if key else f"give only those, as in {example}"
        raise InputError(f"{field} has more than server and path ({parts.hostname}); {fix}.")
    return parts


def usable_url(url: str, prefix: str) -> str:
    """The URL of a model server, with /v1 if it has no path; `prefix` is of its field."""
    if url.startswith(UNIX):
        if not Path(url.removeprefix(UNIX)).is_absolute():
            raise InputError(f"{prefix}url is {url!r}; give the absolute path of a Unix socket.")
        return url
    parts = check_url(url, f"{prefix}url", "http://127.0.0.1:8000/v1", f"{prefix}api_key_env")
    return (url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1").rstrip("/")


def is_local(url: str) -> bool:
    """Whether the server is on this machine, so that no proxy is needed."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or url.startswith(UNIX)


def check_variable(name: str, field: str) -> None:
    """Checks that `name` can be an environment variable's, in capitals; "" means no variable."""
    if name and not VARIABLE.fullmatch(name):
        raise InputError(
            f"{field} is no variable's name in capitals, such as LLM_API_KEY; give one."
        )


def read_key(name: str, field: str) -> str:
    """The key in the environment variable `name`, stripped of white space; "" if `name` is ""."""
    key = os.environ.get(name, "").strip() if name else ""
    if name and not key:
        raise InputError(f"{field} names {name}, which is not set; export the server's key as it.")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise InputError(f"the variable {name} has characters of no API key; export it again.")
    return key


def without_key(text: str, key: str, shortest: int = _SHORTEST) -> str:
    """A server's text, which may repeat the key, without it.

    A shorter key stays where it is: it could be a word of an answer.
    """
    return text.replace(key, BLOTTED) if len(key) >= shortest else text


def http_options(url: str, key: str, transport: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of httpx's clients for a server; `transport` is the class for a Unix socket.

    The environment's proxies are used only for a server on another machine. Redirects are not
    followed: prompts go to the server that was named, and to no other.
    """
    # A small compressed body could expand to a huge one; compression hardly helps short texts.
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    options = {"headers": headers, "trust_env": not is_local(url), "follow_redirects": False}
    if url.startswith(UNIX):
        socket = transport(uds=url.removeprefix(UNIX), verify=_tls())
        return options | {"base_url": "http://localhost/v1", "transport": socket}
    return options | {"base_url": url, "verify": _tls()}


def check_reply(headers: Mapping[str, str], size: int) -> None:
    """Refuses a body that is compressed, or of which so many bytes are too many."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise TooLarge("the reply is packed, which was not asked for")
    if size > LONGEST_REPLY:
        raise TooLarge(f"the reply is longer than {LONGEST_REPLY >> 20} MiB")


@functools.cache
def _tls() -> Any:
    """Certificates, which take a while to load."""
    import httpx2

    return httpx2.create_ssl_context()


class Reply(NamedTuple):
    # HTTP status; 0 if there is no usable reply: no connection, a timeout, a reply that is too
    # long, or a request that cannot be sent
    status: int
    text: str  # the body, or the error if the status is 0; without the API key, should it repeat it

    @property
    def json(self) -> Any:
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
    """Calls a server once for each call, with a body as JSON; `timeout` is in seconds."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url, self._key = url, api_key

    def get(self, path: str, timeout: float = 5.0) -> Reply:
        return self._call("GET", path, None, timeout)

    def post(self, path: str, body: Any = None, timeout: float = 60.0) -> Reply:
        return self._call("POST", path, body, timeout)

    def model_names(self) -> tuple[str, ...]:
        models = self.get("/v1/models").json
        entries = (models.get("data") if isinstance(models, dict) else None) or ()
        return tuple(str(e["id"]) for e in entries if isinstance(e, dict) and "id" in e)

    def _call(self, method: str, path: str, body: Any, timeout: float) -> Reply:
        import httpx2

        options = http_options(self._url, self._key, httpx2.HTTPTransport) | {"trust_env": False}
        # vLLM's own endpoints, such as /health, are next to /v1 and not below it.
        root = options.pop("base_url").rstrip("/").removesuffix("/v1")
        sent: dict[str, Any] = {}
        if body is not None:  # NaN, too: the server knows the field's name
            sent = {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
        try:
            with (
                httpx2.Client(timeout=timeout, **options) as http,
                http.stream(method, root + path, **sent) as reply,
            ):
                content = bytearray()
                for part in reply.iter_raw():
                    content += part
                    check_reply(reply.headers, len(content))
            text = content.decode("utf-8", "replace")
            return Reply(reply.status_code, without_key(text, self._key))
        except (TooLarge, httpx2.HTTPError) as error:
            return Reply(0, without_key(f"{type(error).__name__}: {error}", self._key))
        except (ValueError, httpx2.InvalidURL):  # it may show the key
            return Reply(0, "the request cannot be sent: its address or the API key is malformed")

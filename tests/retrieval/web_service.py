"""A search service on the web: a real HTTP server that answers, or misbehaves, as a test wants."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from qrag_jax.retrieval import pubmed
from qrag_jax.retrieval.pubmed import RemoteEngineConfig
from tests import json_server

pubmed.RATES.update(dict.fromkeys(pubmed.RATES, (10_000.0, 10_000.0)))  # the server is our own


class Call(NamedTuple):
    """A request: its number among those with the same fields, from 0; the fields of the URL or the
    form; the path as it came."""

    nth: int
    target: str
    fields: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def query(self) -> str:
        return self.fields.get("term", self.fields.get("query.term", ""))


@dataclasses.dataclass(frozen=True)
class Say:
    """An answer; a body that is no text is sent as JSON.

    drip: seconds before each byte. drop: the connection is closed without an answer.
    """

    body: Any = ""
    status: int = 200
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    drip: float = 0.0
    drop: bool = False

    def write(self, handler: BaseHTTPRequestHandler) -> None:
        if self.drop:
            return
        data = (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()
        handler.send_response(self.status)
        for name, value in {"Content-Length": str(len(data)), **self.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        for part in (data[n : n + 1] for n in range(len(data))) if self.drip else [data]:
            time.sleep(self.drip)
            handler.wfile.write(part)


Script = Callable[[Call], Say]


@dataclasses.dataclass
class Scripted:
    """The server; its script is called by several threads."""

    script: Script
    url: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def serving(script: Script) -> Iterator[Scripted]:
    """A server that answers while the block runs."""
    scripted, lock = Scripted(script), threading.Lock()

    def answer(came: json_server.Call) -> Callable[[BaseHTTPRequestHandler], None]:
        query = urllib.parse.urlsplit(came.path).query
        form = came.body.decode() if came.method == "POST" else query
        pairs = urllib.parse.parse_qsl(form, keep_blank_values=True, strict_parsing=bool(form))
        fields = dict(pairs)
        assert len(fields) == len(pairs)  # no field comes twice
        with lock:
            nth = sum(call.fields == fields for call in scripted.calls)
            call = Call(nth, came.path, fields, came.headers)
            scripted.calls.append(call)
        return scripted.script(call).write

    with json_server.listening(answer) as scripted.url:
        yield scripted


def quick(url: str, **settings: Any) -> RemoteEngineConfig:
    """Settings for the server at a URL."""
    return RemoteEngineConfig(**{"url": url, "timeout": 5.0} | settings)  # type: ignore[arg-type]


def pubmed_says(ids: Sequence[str], **more: Any) -> Say:
    """As ESearch does."""
    return Say({"esearchresult": {"count": str(len(ids)), "idlist": list(ids), **more}})

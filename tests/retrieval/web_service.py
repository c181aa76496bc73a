"""A real HTTP server on this machine that answers, or misbehaves, as a test wants it."""

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

from qrag_jax.retrieval.pubmed import RemoteEngineConfig
from tests import json_server

KEY = "0123456789abcdef0123456789abcdef0123"  # as long as NCBI's


class Call(NamedTuple):
    """A request: its number among those with the same fields, from 0; the fields of the URL or the
    form, by the rules of forms; path and query as they came."""

    nth: int
    method: str
    target: str
    fields: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

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
        handler.send_header("Content-Length", str(len(data)))
        for name, value in self.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        for start in range(len(data)) if self.drip else ():
            time.sleep(self.drip)
            handler.wfile.write(data[start : start + 1])
        if not self.drip:
            handler.wfile.write(data)


Script = Callable[[Call], Say]


@dataclasses.dataclass
class Scripted:
    """The server; its script is called by several threads."""

    script: Script
    url: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)

    @property
    def queries(self) -> list[str]:
        return [call.query for call in self.calls]


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
            call = Call(nth, came.method, came.path, fields, came.headers)
            scripted.calls.append(call)
        return scripted.script(call).write

    with json_server.listening(answer) as scripted.url:
        yield scripted


def quick(url: str, **settings: Any) -> RemoteEngineConfig:
    """Settings with short pauses for the server at a URL."""
    defaults: dict[str, Any] = {
        "url": url,
        "requests_per_second": 10_000.0,
        "pause": 0.001,
        "timeout": 5.0,
    }
    return RemoteEngineConfig(**defaults | settings)


def pubmed_says(ids: Sequence[str], count: int | None = None, **more: Any) -> Say:
    """As ESearch does."""
    result = {"count": str(len(ids) if count is None else count), "idlist": list(ids), **more}
    return Say({"header": {"type": "esearch", "version": "0.3"}, "esearchresult": result})


def pubmed_error(text: str) -> Say:
    """As ESearch does."""
    return Say({"header": {"type": "esearch", "version": "0.3"}, "esearchresult": {"ERROR": text}})


# What ESearch says both in an outage and where parentheses stay open.
BACKEND = (
    "Search Backend failed: An error occurred while processing request. Status: 500. Source: "
    "/api/search/ Details: Search is temporarily unavailable. Please try again later."
)


def study(number: str, began: str = "2001-02-03") -> dict[str, Any]:
    """As the registry has it; began "": the date is not known."""
    status = {"startDateStruct": {"date": began}} if began else {}
    section = {"identificationModule": {"nctId": number}, "statusModule": status}
    return {"protocolSection": section}


def trials_say(studies: Sequence[Mapping[str, Any]], following: str = "") -> Say:
    """As the registry does."""
    more = {"nextPageToken": following} if following else {}
    return Say({"studies": list(studies), **more})

"""Serves a search over HTTP: `/retrieve`, `/search`, `/health` and `/metrics`.

Every answer that is no result is `{"error": sentence}`. A request whose client has gone is given
up: what of it still waits is not searched.

`Retrieve` and its answer are those of the server of Search-R1 (Jin et al., 2025, arXiv 2503.09516;
`search_r1/search/retrieval_server.py`), which verl's tool for search asks in the same way.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, FiniteFloat
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qrag_jax.errors import InputError
from qrag_jax.llm.endpoint import is_local
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import reason
from qrag_jax.serving import searcher

STOP_SECONDS = 10  # for what waits when the server is asked to stop, and for half a body
_LOOK_EVERY = 0.05  # seconds
MAX_BODY = 8 * 2**20  # bytes
RETRY_AFTER = "1"  # seconds
ENDPOINTS = ("/retrieve", "/search", "/health", "/metrics")
FOREIGN = "the request names another machine (Host); ask by 127.0.0.1 or localhost."
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
CLIENT_GONE = 499  # as nginx counts them


_Value = str | int | FiniteFloat | bool | None


class Retrieve(BaseModel, strict=True):
    """The body of `POST /retrieve`; unknown fields are ignored, as by Search-R1's server."""

    queries: list[str]  # texts
    topk: int | None = None  # passages of each; None: as the server is set
    return_scores: bool = False  # whether documents come with scores


class Search(BaseModel, strict=True, extra="forbid"):
    """The body of `POST /search`; see `searcher.Ask`."""

    questions: list[str]
    topk: int | None = None
    steps: int | None = None
    beam: int | None = None
    threshold: FiniteFloat | None = None
    where: dict[str, _Value | list[_Value]] | None = None


def retrieved(hits: Sequence[Hit], scored: bool) -> list[Mapping[str, Any]]:
    """The hits of one query in Search-R1's form: {"document", "score"}, or bare documents."""
    documents: list[Mapping[str, Any]] = []
    for hit in hits:  # clients take the first line for the title
        document = {"id": hit.id, "contents": f'"{hit.title}"\n{hit.text}'}
        documents.append({"document": document, "score": hit.score} if scored else document)
    return documents


def _sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first of pydantic's errors, without what the client sent."""
    first = errors[0]
    if isinstance(first.get("input"), bytes):  # what FastAPI leaves unread
        return "the body is not said to be JSON; send the header Content-Type: application/json."
    place = first["loc"][1:3] if first["type"] != "json_invalid" else ()
    name = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, place))) or "the body"
    return f"{name}: {first['msg']}."


def make_app(
    worker: searcher.Worker, topk: int = searcher.USUAL_COUNT, *, only_here: bool
) -> FastAPI:
    """The application.

    Args:
        topk: passages of a query to `/retrieve` that does not say how many.
        only_here: requests must name this machine. Else a page in a browser of this machine could
            read the corpus: its own name may be made to mean 127.0.0.1 (DNS rebinding).
    """
    registry = CollectorRegistry()
    of: Any = {"registry": registry}
    by, about = ("endpoint", "status"), "From a request's arrival to its answer."
    requests = Counter("qrag_requests", "Requests answered.", by, **of)
    seconds = Histogram("qrag_request_seconds", about, by[:1], buckets=_SECONDS, **of)
    about = "Questions of one search."
    worker.on_batch = Histogram("qrag_batch_questions", about, buckets=_SIZES, **of).observe
    Gauge("qrag_queue_questions", "Questions that wait.", **of).set_function(lambda: len(worker))
    app = FastAPI(title="qrag_jax", docs_url=None, redoc_url=None)
    app.add_middleware(_Guard, requests=requests, seconds=seconds, only_here=only_here)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(searcher.Busy)
    @app.exception_handler(InputError)
    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            return _error(400, _sentence(error.errors()))
        if not isinstance(error, HTTPException):
            return _error(503 if isinstance(error, searcher.Busy) else 400, str(error))
        nothing = f"there is nothing at this address; use {', '.join(ENDPOINTS)}."
        return _error(error.status_code, nothing if error.status_code == 404 else str(error.detail))

    @app.post("/retrieve")
    async def retrieve(body: Retrieve, request: Request) -> Response:
        count = topk if body.topk is None else body.topk
        asks = [searcher.Ask(query, count=count) for query in body.queries]
        lists, refused = await _answered(worker, request, asks, "queries")
        answer: dict[str, Any] = {"result": [retrieved(x, body.return_scores) for x in lists]}
        # Search-R1 sends the queries of many episodes at once and reads the results whatever the
        # status is: one empty query must not end its training.
        return _json({"error": refused} | answer, 400) if refused else _json(answer)

    @app.post("/search")
    async def search(body: Search, request: Request) -> Response:
        settings = body.model_dump(exclude={"questions", "topk"}) | {"count": body.topk}
        asks = [searcher.Ask(question, **settings) for question in body.questions]
        lists, refused = await _answered(worker, request, asks, "questions")
        hits = [[hit._asdict() for hit in one] for one in lists]
        return _error(400, refused) if refused else _json({"hits": hits})

    @app.get("/health")
    async def health() -> Response:
        if worker.state != searcher.READY:
            return _error(503, f"the server is {worker.state}; ask again later.")
        loaded = worker.loaded.result()
        corpus = {"passages": len(loaded.corpus), "corpus": loaded.corpus.digest}
        return _json({"status": searcher.READY, **corpus, "steps": loaded.most_steps})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return app


async def _answered(
    worker: searcher.Worker, request: Request, asks: Sequence[searcher.Ask], field: str
) -> tuple[list[list[Hit]], str]:
    """The hits of every question, and the first refusal in one sentence; "": there is none.

    A refused question has no hits.
    """
    most = worker.max_queue
    if len(asks) > most:
        raise HTTPException(413, f"the request has {len(asks)} questions; send at most {most}.")
    futures = [asyncio.wrap_future(future) for future in worker.submit(asks)]
    together: asyncio.Future[Any] = asyncio.gather(*futures, return_exceptions=True)
    gone: asyncio.Future[Any] = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([together, gone], return_when=asyncio.FIRST_COMPLETED)
        if not together.done():
            raise HTTPException(CLIENT_GONE, "the client closed the connection.")
    finally:
        gone.cancel()
        together.cancel()
    lists: list[list[Hit]] = []
    refused = ""
    for number, outcome in enumerate(together.result()):
        if isinstance(outcome, InputError):
            refused = refused or f"{field}[{number}]: {outcome}"
        elif isinstance(outcome, BaseException):
            raise outcome
        lists.append([] if isinstance(outcome, InputError) else outcome)
    return lists, refused


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: object, status: int = 200) -> Response:
    """JSON in ASCII: a text may hold half a surrogate pair, which UTF-8 has not."""
    headers = {"Retry-After": RETRY_AFTER} if status == 503 else None
    return Response(json.dumps(value, allow_nan=False), status, headers, "application/json")


def _error(status: int, sentence: str) -> Response:
    return _json({"error": sentence}, status)


def _names_this_machine(scope: Scope) -> bool:
    """Whether the request's header Host is a name of this machine; browsers always send one."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    try:
        return all(is_local(f"http://{host}") for host in hosts)
    except ValueError:  # brackets that do not match
        return False


class _Guard:
    """Counts requests, bounds their bodies, and makes an answer of what no handler caught."""

    def __init__(self, app: ASGIApp, requests: Any, seconds: Any, only_here: bool) -> None:
        self._app, self._requests, self._seconds = app, requests, seconds
        self._only_here = only_here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, size = time.perf_counter(), 0, 0
        endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise HTTPException(413, f"the body is longer than {MAX_BODY} bytes; send less.")
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if self._only_here and not _names_this_machine(scope):
                await _error(403, FOREIGN)(scope, receive, sent)
            else:
                await self._app(scope, bounded, sent)
        except Exception as error:
            if not isinstance(error, searcher.SearchFailed):
                searcher.log_fault(error, f"{scope['method']} {endpoint}")
            if status:  # half an answer is sent: the connection ends here
                raise
            await _error(500, searcher.FAILED_SEARCH)(scope, receive, sent)
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(time.perf_counter() - begun)


# ---------------------------------------------------------------- the process


def bound_socket(host: str, port: int, exposed: bool) -> socket.socket:
    """The socket of an address; only if it is `exposed` may other machines reach it."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        if not (exposed or ip_address(str(address[0]).partition("%")[0]).is_loopback):
            raise InputError(
                f"--host={host} lets others in without a password; if so, add --expose."
            )
        return socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"--host={host} --port={port} cannot be used ({reason(error)}); give others."
        ) from None


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_http(
    app: FastAPI,
    listening: socket.socket,
    worker: searcher.Worker,
    stop: StopSignal,
    on_ready: Callable[[], None],
) -> None:
    """Loads the index and serves until a signal comes; then answers what waits.

    While the index is loaded, `/health` and all questions are answered with 503; then `on_ready` is
    called.
    """
    config = uvicorn.Config(
        app,
        log_level="critical",  # faults are logged by `_Guard`
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = uvicorn.Server(config)  # it takes signals while it serves, and hands them to `stop`

    async def served() -> None:
        serving, announced = asyncio.create_task(server.serve([listening])), False
        while not (serving.done() or server.should_exit or stop.requested or worker.error):
            if worker.state == searcher.READY and not announced:
                announced = True
                on_ready()
            await asyncio.sleep(_LOOK_EVERY)
        worker.stop()
        server.should_exit = True
        await serving

    worker.start()
    try:
        asyncio.run(served())
    finally:
        worker.close(STOP_SECONDS)
    if worker.error is not None:
        raise worker.error

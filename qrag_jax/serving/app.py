"""The server's addresses: `/retrieve`, `/search`, `/health` and `/metrics`.

Every answer that is no result is `{"error": sentence}`. A request whose client has gone is given
up: what of it still waits is not searched.

`Retrieve` and its answer are those of the server of Search-R1 (Jin et al., 2025, arXiv 2503.09516;
`search_r1/search/retrieval_server.py`), which verl's tool for search asks in the same way.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ConfigDict, FiniteFloat
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qrag_jax.errors import InputError
from qrag_jax.llm.endpoint import is_local
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.serving.searcher import USUAL_COUNT, Ask, as_json, check_count
from qrag_jax.serving.worker import (
    FAILED_SEARCH,
    READY,
    Busy,
    SearchFailed,
    Worker,
    log_fault,
)

MAX_BODY = 8 * 2**20  # bytes
RETRY_AFTER = "1"  # seconds
ENDPOINTS = ("/retrieve", "/search", "/health", "/metrics")
FOREIGN = "the request names another machine (Host); ask by 127.0.0.1 or localhost."
BAD_REQUEST, TOO_LARGE, BUSY, INTERNAL, GONE = KINDS = (
    "bad_request",
    "too_large",
    "busy",
    "internal",
    "client_gone",
)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_KINDS = {413: TOO_LARGE, 503: BUSY, 500: INTERNAL}


class Measures:
    """The counters of one server, in the text format of Prometheus.

    Args:
        waiting: gives the number of questions in the queue.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "qrag_requests", "Requests answered.", ("endpoint", "status"), registry=own
        )
        self._errors = Counter("qrag_errors", "Requests that failed.", ("kind",), registry=own)
        for kind in KINDS:
            self._errors.labels(kind)
        self._seconds = Histogram(
            "qrag_request_seconds",
            "From a request's arrival to its answer.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=own,
        )
        self._sizes = Histogram(
            "qrag_batch_questions", "Questions of one search.", buckets=_SIZES, registry=own
        )
        queue = Gauge("qrag_queue_questions", "Questions that wait.", registry=own)
        queue.set_function(waiting)

    def batch(self, size: int) -> None:
        """Counts a search of so many questions."""
        self._sizes.observe(size)

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """Counts a request that was answered."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def error(self, kind: str) -> None:
        """Counts a failure; `kind` is one of `KINDS`."""
        self._errors.labels(kind).inc()

    def text(self) -> bytes:
        """All counters."""
        return generate_latest(self._registry)


_Value = str | int | FiniteFloat | bool | None


class Retrieve(BaseModel):
    """The body of `POST /retrieve`; unknown fields are ignored, as by Search-R1's server."""

    model_config = ConfigDict(strict=True)

    queries: list[str]  # texts
    topk: int | None = None  # passages of each; None: as the server is set
    return_scores: bool = False  # whether documents come with scores


class Search(BaseModel):
    """The body of `POST /search`; see `searcher.Ask`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    questions: list[str]
    topk: int | None = None
    steps: int | None = None
    beam: int | None = None
    threshold: FiniteFloat | None = None
    where: dict[str, _Value | list[_Value]] | None = None


def retrieved(hits: Sequence[Hit], scored: bool) -> list[Mapping[str, Any]]:
    """The hits of one query in Search-R1's form: {"document", "score"}, or bare documents.

    Clients take the first line of a document for its title.
    """
    documents: list[Mapping[str, Any]] = [
        {"id": hit.id, "contents": f'"{hit.title}"\n{hit.text}'} for hit in hits
    ]
    if not scored:
        return documents
    return [{"document": d, "score": hit.score} for d, hit in zip(documents, hits, strict=True)]


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8; in ASCII where a text holds half a surrogate pair, which UTF-8 has not."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first of pydantic's errors in one sentence, without what the client sent.

    Args:
        errors: as `ValidationError.errors` gives them for a body.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return 'the body is no JSON; send an object such as {"queries": ["…"]}.'
    _, *place = first["loc"]
    if isinstance(first.get("input"), bytes):  # what FastAPI leaves unread
        return "the body is not said to be JSON; send the header Content-Type: application/json."
    if not place:
        return 'the body is no JSON object; send one such as {"queries": ["…"]}.'
    name = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, place[:2])))
    if first["type"] == "missing":
        return f"the field {name} is missing; send it."
    if first["type"] == "extra_forbidden":
        return f"the field {name} is unknown; use {', '.join(Search.model_fields)}."
    message = str(first["msg"])
    return f"{name}: {message[:1].lower()}{message[1:]}."


class _Gone(Exception):
    """The client closed the connection."""


def make_app(
    worker: Worker, counters: Measures, topk: int = USUAL_COUNT, *, only_here: bool
) -> FastAPI:
    """The application.

    Args:
        worker: answers the questions.
        counters: what is counted.
        topk: passages of a query to `/retrieve` that does not say how many.
        only_here: requests must name this machine. Else a page in a browser of this machine could
            read the corpus: its own name may be made to mean 127.0.0.1 (DNS rebinding).
    """
    app = FastAPI(title="qrag_jax", docs_url=None, redoc_url=None)
    app.add_middleware(_Guard, counters=counters, only_here=only_here)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _error(400, sentence(error.errors()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        method = (error.headers or {}).get("Allow", "another method")
        sentences = {
            404: f"there is nothing at this address; use {', '.join(ENDPOINTS)}.",
            405: f"this address takes {method} alone.",
            400: "the body cannot be read; send JSON in UTF-8.",
        }
        return _error(error.status_code, sentences.get(error.status_code, str(error.detail)))

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> Response:
        return _error(503, str(error))

    @app.exception_handler(InputError)
    async def bad(request: Request, error: InputError) -> Response:
        return _error(400, str(error))

    @app.exception_handler(_Gone)
    async def gone(request: Request, error: _Gone) -> Response:
        counters.error(GONE)
        return Response(status_code=499)  # nobody reads it

    @app.post("/retrieve")
    async def retrieve(body: Retrieve, request: Request) -> Response:
        count = topk if body.topk is None else body.topk
        if worker.searcher is not None:
            check_count(count, worker.searcher.corpus)
        asks = [Ask(query, count=count) for query in body.queries]
        outcomes = await _answered(worker, request, asks)
        wrong = _refusal("queries", outcomes)
        lists = [[] if isinstance(o, InputError) else o for o in outcomes]
        answer: dict[str, Any] = {"result": [retrieved(x, body.return_scores) for x in lists]}
        if wrong is None:
            return _json(answer)
        # Search-R1 sends the queries of many episodes at once and reads the results whatever the
        # status is: one empty query must not end its training.
        return _json({"error": wrong} | answer, 400)

    @app.post("/search")
    async def search(body: Search, request: Request) -> Response:
        settings = body.model_dump(exclude={"questions", "topk"}) | {"count": body.topk}
        asks = [Ask(question, **settings) for question in body.questions]
        outcomes = await _answered(worker, request, asks)
        wrong = _refusal("questions", outcomes)
        if wrong is not None:
            return _error(400, wrong)
        hits = [[as_json(hit) for hit in o] for o in outcomes if not isinstance(o, InputError)]
        return _json({"hits": hits})

    @app.get("/health")
    async def health() -> Response:
        searcher = worker.searcher
        if worker.state != READY or searcher is None:
            return _error(503, f"the server is {worker.state}; ask again later.")
        return _json(
            {
                "status": READY,
                "passages": len(searcher.corpus),
                "corpus": searcher.corpus.digest,
                "steps": searcher.most_steps,
            }
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(counters.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return app


async def _answered(
    worker: Worker, request: Request, asks: Sequence[Ask]
) -> list[list[Hit] | InputError]:
    """The outcome of every question; a refused one has its `InputError`."""
    most = worker.config.max_queue
    if len(asks) > most:
        raise HTTPException(413, f"the request has {len(asks)} questions; send at most {most}.")
    futures = [asyncio.wrap_future(future) for future in worker.submit(asks)]
    together: asyncio.Future[Any] = asyncio.gather(*futures, return_exceptions=True)
    gone: asyncio.Future[Any] = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([together, gone], return_when=asyncio.FIRST_COMPLETED)
        if not together.done():
            raise _Gone
    finally:
        gone.cancel()
        together.cancel()
    outcomes: list[list[Hit] | InputError] = []
    for outcome in together.result():
        if isinstance(outcome, BaseException) and not isinstance(outcome, InputError):
            raise outcome
        outcomes.append(outcome)
    return outcomes


async def _gone(request: Request) -> None:
    """Returns when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(field: str, outcomes: Sequence[list[Hit] | InputError]) -> str | None:
    """The first question that was refused, in one sentence."""
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, InputError):
            return f"{field}[{place}]: {outcome}"
    return None


def _json(value: object, status: int = 200) -> Response:
    headers = {"Retry-After": RETRY_AFTER} if status == 503 else None
    return Response(json_bytes(value), status, headers, "application/json")


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
    """Counts requests, bounds their bodies, and makes an answer of what no handler caught.

    It refuses requests by another machine's name, if it is told to.
    """

    def __init__(self, app: ASGIApp, counters: Measures, only_here: bool) -> None:
        self._app, self._counters, self._only_here = app, counters, only_here

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
            if not isinstance(error, SearchFailed):
                log_fault(error, f"{scope['method']} {endpoint}")
            if status:  # half an answer is sent: the connection ends here
                raise
            await _error(500, FAILED_SEARCH)(scope, receive, sent)
        self._counters.request(endpoint, status, time.perf_counter() - begun)
        if status >= 400 and status != 499:
            self._counters.error(_KINDS.get(status, BAD_REQUEST))

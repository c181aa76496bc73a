"""Readers of answers of servers, and the servers' own reading of requests."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.tried_inputs import TextReader
from qrag_jax.errors import InputError
from qrag_jax.llm.client import replies
from qrag_jax.llm.outcomes import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Failure,
    Request,
    RerankRequest,
)
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.retrieval.pubmed import Page, Part, read_pubmed, read_trials
from qrag_jax.retrieval.single_step import SingleStepSearch
from qrag_jax.serving.measures import Measures
from qrag_jax.serving.searcher import SingleStep
from qrag_jax.serving.worker import Worker

_USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
_CHAT = {
    "model": "m",
    "choices": [
        {
            "message": {"role": "assistant", "content": "Oslo"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "Oslo", "logprob": -0.5}]},
            "token_ids": [1],
        }
    ],
    "usage": _USAGE,
}
_COMPLETION = {
    "choices": [
        {
            "text": "Oslo",
            "finish_reason": "length",
            "logprobs": {"tokens": ["Oslo"], "token_logprobs": [-0.5]},
        }
    ]
}
_VECTORS = {"data": [{"index": 0, "embedding": [0.5, 1.0]}], "usage": _USAGE}
_SCORES = {"results": [{"index": 0, "relevance_score": 0.5}], "usage": _USAGE}
_PUBMED = {"esearchresult": {"count": "2", "retmax": "2", "idlist": ["11", "12"]}}
_STUDY = {
    "protocolSection": {
        "identificationModule": {"nctId": "NCT01234567"},
        "statusModule": {"startDateStruct": {"date": "2014-05"}},
    }
}
_TRIALS = {"studies": [_STUDY], "nextPageToken": "abc"}


def _answer(request: Request) -> Callable[[str], Any]:
    """Reads the answer to a request, and uses it as the callers do."""

    def read(text: str) -> Any:
        found = replies.read_outcome(request, text, "v1")
        if isinstance(found, Failure):
            return found
        if isinstance(request, RerankRequest):
            json.loads(found.text)
        return json.dumps(found.text) + str(sum(found.log_probs)) + str(found.usage)

    return read


def _error(text: str) -> Failure | None:
    """Reads the error in an answer, and a header."""
    for status in (400, 413, 429, 500):
        replies.read_error(status, text)
    replies.retry_after({"retry-after": text})
    return None


def _page(reads: Callable[[int, str, Part], Page | Failure]) -> Callable[[str], Any]:
    part = Part("oslo", "2000-01-01", "2015-01-01", 10)

    def read(text: str) -> Any:
        for status in (400, 200):
            found = reads(status, text, part)
        return found

    return read


@functools.cache
def _worker() -> tuple[Worker, Any]:
    """A worker over a real index of words; and the owner of its folder, who removes it."""
    owner = tempfile.TemporaryDirectory()
    texts = ("Oslo is a city.", "Norway is a country.", "The fjord is long.")
    corpus = write_corpus(
        Path(owner.name) / "corpus",
        (Passage(f"p{n}", text, "", {"page": n}) for n, text in enumerate(texts)),
    )
    search = SingleStepSearch(BM25Index.build(corpus))
    worker = Worker(lambda: SingleStep(search))
    worker.start()
    worker.await_loaded()
    return worker, owner


def _post(path: str) -> Callable[[str], Any]:
    """Sends a body to the server's application; a status of 500 and above is a fault."""

    async def ask(text: str) -> tuple[int, Mapping[str, Any]]:
        import httpx

        from qrag_jax.serving.app import make_app

        transport = httpx.ASGITransport(make_app(_worker()[0], Measures(lambda: 0), only_here=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"Content-Type": "application/json"}
            body = text.encode("utf-8", "surrogatepass")
            answer = await client.post(path, content=body, headers=headers)
            return answer.status_code, answer.json()

    def read(text: str) -> None:
        status, said = asyncio.run(ask(text))
        if status >= 500:
            raise AssertionError(f"status {status}: {said}")
        if status >= 400:
            raise InputError(said["error"])

    return read


def _tool(text: str) -> None:
    """Calls the tool of the Model Context Protocol with arguments."""
    from mcp.server.mcpserver.exceptions import ToolError

    from qrag_jax.serving.mcp_tool import make_tool

    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return  # the package itself answers this
    if not isinstance(arguments, dict):
        return
    try:
        asyncio.run(make_tool(_worker()[0]).call_tool("search", arguments))
    except ToolError as error:
        raise InputError(" ".join(str(error).split())[:200]) from None


def readers() -> list[TextReader]:
    """The readers of this module."""
    answers: tuple[tuple[str, Request, Any], ...] = (
        ("an answer to a chat", ChatRequest((("user", "Where?"),), model="m"), _CHAT),
        ("a completion", CompletionRequest("Where?"), _COMPLETION),
        ("vectors of a server", EmbeddingRequest(((1, 2),)), _VECTORS),
        ("scores of a server", RerankRequest("where", ("Oslo",)), _SCORES),
    )
    retrieve = {"queries": ["oslo", "fjord"], "topk": 2, "return_scores": True}
    search = {
        "questions": ["oslo"],
        "topk": 2,
        "steps": 1,
        "beam": 1,
        "threshold": 0.1,
        "where": {"page": [0, 1]},
    }
    return [
        *(
            TextReader(name, (json.dumps(sound),), _answer(request))
            for name, request, sound in answers
        ),
        TextReader("an error of a server", ('{"error": {"message": "busy"}}', "busy", "3"), _error),
        TextReader("an answer of PubMed", (json.dumps(_PUBMED),), _page(read_pubmed)),
        TextReader("an answer of ClinicalTrials.gov", (json.dumps(_TRIALS),), _page(read_trials)),
        TextReader("requests to /retrieve", (json.dumps(retrieve),), _post("/retrieve")),
        TextReader("requests to /search", (json.dumps(search),), _post("/search")),
        TextReader(
            "calls of the tool", ('{"question": "oslo", "topk": 2, "where": {"page": 0}}',), _tool
        ),
    ]

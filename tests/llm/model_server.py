"""A real HTTP server with OpenAI's completions API and `/rerank`; its script makes it misbehave."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

from qrag_jax.data.sample import Sample
from qrag_jax.llm.client import Client
from qrag_jax.llm.outcomes import Answer, ChatRequest, Outcome
from tests import json_server

MakeClient = Callable[..., Client]


def chat(prompt: str, **parameters: Any) -> ChatRequest:
    """A chat whose last message is the prompt, which the server echoes."""
    return ChatRequest((("system", "Echo."), ("user", prompt)), **parameters)


def texts(outcomes: Sequence[Outcome]) -> list[str]:
    """Texts of answers and causes of failures."""
    return [outcome.text if isinstance(outcome, Answer) else outcome.cause for outcome in outcomes]


@dataclasses.dataclass(frozen=True)
class Call:
    """A received request."""

    number: int  # of the POST request, from 0
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]  # their names are in lower case

    @property
    def prompt(self) -> str:
        """The last message, the query of the documents, or the text to complete."""
        if "query" in self.body:
            return self.body["query"]
        if "messages" in self.body:
            return self.body["messages"][-1]["content"]
        return self.body["prompt"]


@dataclasses.dataclass(frozen=True)
class Reply:
    """A scripted reply."""

    text: str | None = None  # of the answer, or message of an error; None: "echo: " and the prompt
    status: int = 200
    delay: float = 0.0  # seconds before the reply
    raw: str | None = None  # a whole body that replaces the usual one
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    drop: bool = False  # close the connection without a reply
    choice: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str | None = None  # the name of the model that answers; None: the one asked for


Script = Callable[[Call], Reply]


class ModelServer:
    """Serves the model "tiny" on 127.0.0.1; `kill` and `start` keep its port.

    Attributes:
        script: makes the reply to each call, one at a time; may be changed at any time.
        calls: all requests for completions so far.
        most_at_once: largest number of completions in work at the same time.
        clients: the addresses of all connections so far.
    """

    def __init__(self, script: Script = lambda call: Reply()) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.most_at_once = self._at_once = 0
        self.clients: set[Any] = set()
        self.url = "http://127.0.0.1:0/v1"  # the base URL of the API
        self._open: set[socket.socket] = set()
        self._turn = threading.Lock()
        self._listens = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        """Starts to listen; after `kill`, on the same port as before."""
        port = urllib.parse.urlsplit(self.url).port
        running = json_server.listening(lambda came: partial(self._reply, came), port, "HTTP/1.1")
        self.url = f"{self._listens.enter_context(running)}/v1"

    def kill(self) -> None:
        """Refuses connections and breaks the open ones, like a process that dies."""
        self._listens.close()
        for connection in [*self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def _reply(self, came: json_server.Call, handler: BaseHTTPRequestHandler) -> None:
        self._open.add(handler.connection)
        self.clients.add(handler.client_address)
        if came.method == "GET":
            _send(handler, 200, '{"object": "list", "data": [{"id": "tiny"}]}', {})
            return
        headers = {name.lower(): value for name, value in came.headers.items()}
        with self._turn:
            call = Call(len(self.calls), came.path, json.loads(came.body), headers)
            self.calls.append(call)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            reply = self.script(call)
        time.sleep(reply.delay)
        with self._turn:
            self._at_once -= 1
        if reply.drop:
            handler.close_connection = True
        else:
            _send(handler, reply.status, _body(call, reply), reply.headers)


def supported_answers(samples: Mapping[str, Sample]) -> Callable[[Call], Reply]:
    """Replies with the answer if all supporting facts of a question are in the prompt."""

    def script(call: Call) -> Reply:
        sample = samples[call.prompt.rpartition("Question: ")[2]]
        found = all(sample.chunks[index].strip() in call.prompt for index in sample.support)
        return Reply(f"Let me see.\n**Final answer:** {sample.answers[0] if found else 'unknown'}")

    return script


def _send(
    handler: BaseHTTPRequestHandler, status: int, body: str, headers: Mapping[str, str]
) -> None:
    data = body.encode()
    handler.send_response(status)
    head = {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
    for name, value in head.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def _body(call: Call, reply: Reply) -> str:
    if reply.raw is not None:
        return reply.raw
    if reply.status != 200:
        return json.dumps({"error": {"message": reply.text or "as scripted"}})
    if call.path.endswith("/rerank"):
        return _scores(call)
    text = f"echo: {call.prompt}" if reply.text is None else reply.text
    said: dict[str, Any] = {"text": text}
    if call.path.endswith("/chat/completions"):
        said = {"message": {"role": "assistant", "content": text}}
    choice = {"index": 0, "finish_reason": "stop", **said, **reply.choice}
    usage = {"prompt_tokens": len(str(call.prompt).split()), "completion_tokens": 2}
    model = call.body["model"] if reply.model is None else reply.model
    fields = {"object": "chat.completion", "model": model, "choices": [choice], "usage": usage}
    return json.dumps(fields)


def _scores(call: Call) -> str:
    """As vLLM's: the best document first; the score is the number of words of the query in it."""
    words = call.body["query"].split()
    counts = [sum(word in text.split() for word in words) for text in call.body["documents"]]
    results = [{"index": n, "relevance_score": float(count)} for n, count in enumerate(counts)]
    results.sort(key=lambda each: -each["relevance_score"])
    usage = {"prompt_tokens": len(words), "total_tokens": len(words)}
    return json.dumps({"id": "rerank-1", "model": "tiny", "usage": usage, "results": results})

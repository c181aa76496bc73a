"""Serves turns of the policy on 127.0.0.1 as vLLM does, by POST /inference/v1/generate: ids alone.

Whoever asks knows a key of this start, and the name of its session begins with the number of its
episode. What is asked goes to the thread that plays, which samples it with the turns of the other
episodes. `/render/…` makes messages to ids and ids to messages, as `llm.text.chat_rendering` does,
for agents that only know messages.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.chat_rendering import ChatRenderer, TextLost
from qrag_jax.rollouts.trajectories import Sampled

HOST = "127.0.0.1"
SESSION = "X-Session-ID"  # the header in which verifiers names a rollout: EPISODE-REST
_LARGEST = 64 * 2**20  # bytes of a request
_LOOK_EVERY = 1.0  # seconds between looks whether the server is closed


class Wanted(NamedTuple):
    episode: int  # its number
    ids: np.ndarray  # int32, all before the turn
    sampling: Mapping[str, Any]  # of the request
    turn: Future[Sampled | Failure]  # takes what was sampled, or why nothing was


class _Wrong(Exception):
    """A request that is answered by an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    # As many episodes may ask at once; a connection that finds no place waits for a second or more.
    request_queue_size = 1024


_KINDS = {  # of errors, as vLLM calls them
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    413: "BadRequestError",
    503: "ServiceUnavailableError",
}


class GenerateServer:
    """The server; use it as a context manager.

    Args:
        room: most tokens of a row.
        want: takes what is asked for, from any thread.

    Attributes:
        url: with /v1.
        key: what a client must give as its API key.
    """

    def __init__(
        self, model: str, room: int, renderer: ChatRenderer, want: Callable[[Wanted], None]
    ) -> None:
        self.key = secrets.token_urlsafe(24)
        self._model, self._room, self._renderer, self._want = model, room, renderer, want
        self._closed = threading.Event()
        server = self
        routes: dict[tuple[str, str], Callable[[Any, Any], dict[str, Any]]] = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/render/opening"): self._opening,
            ("POST", "/render/after"): self._after,
            ("POST", "/render/spoken"): self._spoken,
        }

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                try:
                    authorization = (self.headers.get("Authorization") or "").encode()
                    if not hmac.compare_digest(authorization, f"Bearer {server.key}".encode()):
                        raise _Wrong("the API key is wrong", 401)
                    path = self.path.partition("?")[0].rstrip("/")
                    if (route := routes.get((self.command, path))) is None:
                        raise _Wrong(f"there is no {self.path}", 404)
                    status, found = 200, route(self._body(), self.headers)
                except _Wrong as wrong:
                    status, kind = wrong.status, _KINDS[wrong.status]
                    about = {"message": str(wrong), "type": kind, "param": None, "code": status}
                    found = {"error": about}
                    self.close_connection = True
                data = json.dumps(found).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_POST = do_GET

            def _body(self) -> dict[str, Any]:
                size = int(self.headers.get("Content-Length") or 0)
                if size > _LARGEST:
                    raise _Wrong(f"the request has {size} bytes", 413)
                try:
                    body = json.loads(self.rfile.read(size) or "{}")
                except ValueError:
                    body = None
                if not isinstance(body, dict):
                    raise _Wrong("the request is no JSON object")
                return body

            def log_message(self, format: str, *args: Any) -> None:
                return None

        self._http = _Listener((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="generate", daemon=True
        )

    def __enter__(self) -> GenerateServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    # ---------------------------------------------------------------- routes

    def _models(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        card = {"id": self._model, "object": "model", "owned_by": "qrag_jax"}
        return {"object": "list", "data": [card | {"max_model_len": self._room}]}

    def _generate(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        name = body.get("model")
        if name not in (None, self._model):
            what = f"the model {name!r} does not exist; the one that is trained is {self._model!r}"
            raise _Wrong(what, 404)
        number = (headers.get(SESSION) or "").partition("-")[0]
        if not number.isdecimal():
            raise _Wrong(f"the header {SESSION} names no episode")
        ids = _ids(body)
        if len(ids) >= self._room:
            raise _Wrong(
                f"the maximum context length is {self._room} tokens, and the prompt has {len(ids)}"
            )
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise _Wrong("sampling_params is no object")
        stop_ids = self._renderer.stop_ids()
        if others := {*(sampling.get("stop_token_ids") or ())}.difference(stop_ids):
            raise _Wrong(
                f"turns end at the tokens {', '.join(map(str, stop_ids))}, not at "
                f"{', '.join(map(str, sorted(others)))}; use a renderer of this model"
            )
        asked = {name: value for name, value in sampling.items() if name != "stop_token_ids"}
        turn: Future[Sampled | Failure] = Future()
        self._want(Wanted(int(number), ids, asked, turn))
        while not wait([turn], _LOOK_EVERY).done:
            if self._closed.is_set():
                raise _Wrong("the run has ended", 503)
        sampled = turn.result()
        if isinstance(sampled, Failure):
            raise _Wrong(sampled.message, 400 if sampled.cause in ("request", "too_long") else 503)
        request = body.get("request_id") or secrets.token_hex(16)
        head = {"request_id": request, "model": self._model, "created": int(time.time())}
        return head | _generated(len(ids), sampled)

    def _opening(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Messages and tools to ids."""
        tools = body.get("tools") or []
        return _rendered(lambda: self._renderer.opening(body["messages"], tools))

    def _after(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Messages to the ids that follow sampled ones; null if turns are rewritten."""
        said, tools = _ids(body), body.get("tools") or []
        return _rendered(lambda: self._renderer.after(said, body["messages"], tools))

    def _spoken(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Sampled ids to a message."""
        return self._renderer.spoken(_ids(body))._asdict()


def _ids(body: Mapping[str, Any]) -> np.ndarray:
    given = body.get("token_ids")
    listed = given if isinstance(given, list) else []
    if not listed or not all(type(each) is int and 0 <= each < 2**31 for each in listed):
        raise _Wrong("token_ids is no list of token ids, one at least")
    return np.array(listed, np.int32)


def _rendered(render: Callable[[], np.ndarray | None]) -> dict[str, Any]:
    try:
        ids = render()
    except (TextLost, KeyError, TypeError) as error:
        raise _Wrong(str(error)) from None
    return {"token_ids": None if ids is None else ids.tolist()}


def _generated(prompt: int, sampled: Sampled) -> dict[str, Any]:
    """A turn behind so many tokens, as vLLM answers it.

    vLLM names a token by `token_id`, and did so in `token` before; both are given.
    """
    content = []
    for number, value in zip(sampled.ids.tolist(), sampled.log_probs.tolist()):
        drawn = {"token_id": number, "logprob": value, "rank": None}
        content.append({"token": f"token_id:{number}", **drawn, "top_logprobs": [drawn]})
    choice = {
        "index": 0,
        "token_ids": sampled.ids.tolist(),
        "finish_reason": sampled.finish,
        "logprobs": {"content": content},
        **dict.fromkeys(("stop_reason", "routed_experts", "sampling_mask", "weight_versions")),
    }
    count = len(sampled.ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    return {"output_mode": "tokens", "choices": [choice], "usage": usage, "prompt_logprobs": None}

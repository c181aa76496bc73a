"""The client as its callers and a server that misbehaves meet it; what it keeps secret."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.llm import endpoint
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.outcomes import Answer, CompletionRequest, Failure, Outcome
from tests import json_server
from tests.entry_points import wait_until
from tests.llm.model_server import Call, MakeClient, ModelServer, Reply, chat, texts

CHILD = """
import sys
import qrag_jax.llm.server.server, qrag_jax.llm.server.publish, qrag_jax.llm.text.scaffolds
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.outcomes import ChatRequest
client = Client(ClientConfig(url=sys.argv[1], model="tiny"))
print(client.ask_blocking([ChatRequest((("user", "hello"),))])[0].text)
assert "jax" not in sys.modules and "torch" not in sys.modules
future = client.submit([ChatRequest((("user", "never answered"),))])
"""


def only(outcomes: list[Outcome]) -> Failure:
    (outcome,) = outcomes
    assert isinstance(outcome, Failure), outcome
    return outcome


def always(reply: Reply) -> Callable[[Call], Reply]:
    return lambda call: reply


def test_answers_keep_their_order(server: ModelServer, make_client: MakeClient) -> None:
    """And the server gets what was asked; one that cannot be sent fails alone."""
    delays = random.Random(0)
    # The first replies take a second, so that all places are taken on a slow machine, too.
    server.script = lambda call: Reply(delay=1 if call.number < 24 else delays.random() * 0.02)
    requests: list[Any] = [chat(f"question {index}", seed=index) for index in range(150)]
    requests += [CompletionRequest("once upon", max_tokens=7, log_probs=True), chat("half \ud800")]
    answers = make_client(concurrency=24, version="step 3").ask_blocking(requests)
    expected = [*(f"echo: question {index}" for index in range(150)), "echo: once upon", "request"]
    assert texts(answers) == expected
    assert {each.version for each in answers if isinstance(each, Answer)} == {"step 3"}
    sent = {(call.path, json.dumps(call.body, sort_keys=True)) for call in server.calls}
    assert sent == {
        (f"/v1{each.path}", json.dumps(each.body("tiny"), sort_keys=True)) for each in requests[:-1]
    }
    assert 12 <= server.most_at_once <= 24
    assert len(server.clients) <= 25  # connections are used again


def test_identical_requests_in_flight_are_sent_once(
    server: ModelServer, make_client: MakeClient
) -> None:
    server.script = lambda call: Reply(delay=0.2)
    client = make_client()
    greedy = client.submit([chat("same"), chat("other"), chat("same"), chat("same")])
    sampled = client.submit([chat("sampled", temperature=1.0)] * 3)
    wait_until(lambda: len(server.calls) == 5)
    joining = client.submit([chat("same")])
    time.sleep(0.05)
    assert joining.cancel()  # which leaves the request to those who asked first
    assert texts(greedy.result(30)) == ["echo: same", "echo: other", "echo: same", "echo: same"]
    sampled.result(30)
    sent = [call.prompt for call in server.calls]
    assert sorted(sent) == ["other", "same", "sampled", "sampled", "sampled"]
    counters = client.counters()
    assert (counters["calls"], counters["answers"], counters["shared"]) == (5, 5, 2)


def test_cancelling_one_batch_leaves_the_others_whole(
    server: ModelServer, make_client: MakeClient
) -> None:
    server.script = lambda call: Reply(delay=0.05 if call.prompt.startswith("later") else 0.3)
    client = make_client(concurrency=8)
    cancelled = client.submit([chat(f"shared {index}") for index in range(200)])
    wait_until(lambda: len(server.calls) >= 8)
    # These join requests of the batch that is cancelled, and must then ask themselves.
    kept = client.submit([chat(f"shared {index}") for index in range(12)])
    later = client.submit([chat(f"later {index}") for index in range(20)])
    time.sleep(0.05)
    assert cancelled.cancel()
    with pytest.raises(CancelledError):
        cancelled.result(30)
    assert texts(kept.result(30)) == [f"echo: shared {index}" for index in range(12)]
    assert texts(later.result(30)) == [f"echo: later {index}" for index in range(20)]
    sent = {call.prompt for call in server.calls}
    assert not sent & {f"shared {index}" for index in range(40, 200)}


def test_a_request_names_its_model(
    server: ModelServer, make_client: MakeClient, tmp_path: Path
) -> None:
    client = make_client(model="tiny@3", version="3", cache=str(tmp_path / "answers.sqlite"))
    requests = [chat("a"), chat("a", model="tiny@2"), chat("a", model="tiny@3")]
    answers = client.ask_blocking(requests)
    assert sorted(call.body["model"] for call in server.calls) == ["tiny@2", "tiny@3"]
    assert [each.version for each in answers if isinstance(each, Answer)] == ["3", "", "3"]
    # Of the same question, the cache keeps the answers of two models apart.
    assert client.ask_blocking(requests) == answers
    assert len(server.calls) == 2
    # It is the request's own model that must answer; the client's may have several names.
    server.script = lambda call: Reply(model="tiny@3")
    outcomes = client.ask_blocking([chat("b", model="tiny@2"), chat("c")])
    assert texts(outcomes) == ["malformed", "echo: c"]


def test_close_cancels_what_is_in_flight(server: ModelServer, make_client: MakeClient) -> None:
    server.script = lambda call: Reply(delay=30)
    others = {*threading.enumerate()}  # of earlier tests in this process, perhaps
    client = make_client()
    future = client.submit([chat("a")])
    wait_until(lambda: len(server.calls) == 1)
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 5
    with pytest.raises(CancelledError):
        future.result(0)
    with pytest.raises(RuntimeError, match="closed"):
        client.submit([chat("b")])
    assert not any(thread.name == "llm" for thread in {*threading.enumerate()} - others)


def test_the_thread_ends_with_the_process_and_jax_is_not_imported(server: ModelServer) -> None:
    server.script = lambda call: Reply(delay=0.0 if call.prompt == "hello" else 60.0)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, server.url], capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.stderr, done.returncode) == ("echo: hello\n", "", 0)
    assert time.monotonic() - started < 45


# ---------------------------------------------------------------- attempts and deadlines


def test_errors_that_may_pass_use_up_the_attempts(
    server: ModelServer, make_client: MakeClient
) -> None:
    client = make_client(attempts=3, attempt_timeout=0.3)
    for fault, cause, attempts, message in (
        (Reply(status=500, text="engine died"), "server", 3, "engine died"),
        (Reply(drop=True), "connection", 3, "disconnected"),
        (Reply(delay=30), "timeout", 3, "0.3 s"),
        (Reply(status=400, text="no such model"), "request", 1, "no such model"),
        (Reply(status=400, text="exceeds the context size"), "too_long", 1, "context"),
    ):
        server.script, before = always(fault), len(server.calls)
        failure = only(client.ask_blocking([chat("a")]))
        assert (failure.cause, failure.attempts) == (cause, attempts)
        assert len(server.calls) - before == attempts
        assert message in failure.message


def test_the_deadline_holds_over_all_attempts(server: ModelServer, make_client: MakeClient) -> None:
    server.script = lambda call: Reply(delay=30)
    client = make_client(attempt_timeout=0.2, deadline=0.7, attempts=1000)
    started = time.monotonic()
    failure = only(client.ask_blocking([chat("a")]))
    assert failure.cause == "timeout"
    assert 0.5 < time.monotonic() - started < 5
    assert 2 <= failure.attempts == len(server.calls) <= 4


def test_429_is_waited_out_as_the_server_asks(server: ModelServer, make_client: MakeClient) -> None:
    began = time.time()
    until = began + 1.0

    def script(call: Call) -> Reply:
        if time.time() >= until:
            return Reply()
        return Reply(status=429, headers={"Retry-After": f"{until - time.time():.2f}"})

    server.script = script
    client = make_client(attempts=4, concurrency=8)
    outcomes = client.ask_blocking([chat(str(index)) for index in range(40)])
    assert texts(outcomes) == [f"echo: {index}" for index in range(40)]
    # With pauses of 0.01 s there would have been many more.
    assert 8 <= len(server.calls) - 40 <= 16
    assert time.time() - began >= 1.0
    # A wait past the deadline is not begun.
    server.script = lambda call: Reply(status=429, headers={"Retry-After": "3600"})
    failure = only(client.ask_blocking([chat("a")]))
    assert (failure.cause, failure.attempts) == ("rate_limit", 1)


def test_long_and_compressed_replies_are_not_read_to_their_end(
    server: ModelServer, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "LONGEST_REPLY", 100_000)
    server.script = lambda call: Reply("x" * (200_000 if call.prompt == "long" else 90_000))
    client = make_client(attempts=2)
    outcomes = client.ask_blocking([chat("short"), chat("long")])
    assert (len(texts(outcomes)[0]), texts(outcomes)[1]) == (90_000, "malformed")
    assert {call.headers["accept-encoding"] for call in server.calls} == {"identity"}
    for reply in (
        Reply(status=400, raw="x" * 200_000),
        Reply(headers={"Content-Encoding": "gzip"}),  # could unpack to one without end
    ):
        server.script = always(reply)
        assert only(client.ask_blocking([chat("other")])).cause == "malformed"


# ---------------------------------------------------------------- outages


def test_waiting_costs_neither_deadline_nor_attempts(
    server: ModelServer, make_client: MakeClient
) -> None:
    server.kill()
    client = make_client(deadline=1.0, attempts=1)
    future = client.submit([chat("a")])
    time.sleep(1.1)
    assert not future.done()
    server.start()
    assert texts(future.result(30)) == ["echo: a"]
    assert client.counters()["retries"] == 0
    assert client.counters().latency(100) < 1.1


def test_waiting_ends_at_the_limit(
    server: ModelServer, make_client: MakeClient, said: list[str]
) -> None:
    server.kill()
    client = make_client(wait_limit=0.5, concurrency=4, prefix="--llm.")
    started = time.monotonic()
    outcomes = client.ask_blocking([chat(str(index)) for index in range(200)])
    # The limit is the outage's, not each request's: 50 times 0.5 s would be 25.
    assert 0.4 < time.monotonic() - started < 10
    assert set(texts(outcomes)) == {"connection"}
    assert "--llm.wait_limit" in only(outcomes[:1]).message
    assert client.counters()["failures_connection"] == 200
    assert len(said) <= 6
    server.start()
    wait_until(lambda: texts(client.ask_blocking([chat("a")])) == ["echo: a"])


# ---------------------------------------------------------------- keys and other servers

KEY = "sk-of-a-test-0123456789"


def test_single_calls_hide_a_repeated_key() -> None:
    """A short one may be a word of the answer."""

    def repeats(call: json_server.Call) -> tuple[int, Any]:
        return 401, {"error": f"you sent {call.headers['Authorization']}"}

    with json_server.listening(repeats) as url:
        reply = Endpoint(url, KEY).get("/v1/models")
        assert Endpoint(url, "sk-3").get("/v1/models").json == {"error": "you sent Bearer sk-3"}
    assert reply.json == {"error": "you sent Bearer [the API key]"}
    assert KEY not in reply.reason
    reply = Endpoint("http://127.0.0.1:9/v1", f"{KEY}\n456").get("/v1/models")
    assert reply.status == 0
    assert KEY not in reply.reason


def test_prompts_go_to_no_other_server(
    make_client: MakeClient, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to a proxy where the server is on this machine, and not where it redirects. The key of
    the client's own server, which a failure does not repeat: tests/test_planted_keys.py."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # of somebody else
    assert texts(make_client(wait_limit=1.0).ask_blocking([chat("a")])) == ["echo: a"]
    assert KEY not in str(server.calls[0].headers)
    with ModelServer() as other:
        target = f"{other.url}/chat/completions"
        server.script = lambda call: Reply(status=307, headers={"location": target})
        assert texts(make_client().ask_blocking([chat("a")])) == ["request"]
        assert other.calls == []

"""A server that dies: calls wait, one probe at a time looks, everything is answered at the end."""

from __future__ import annotations

import time

import pytest

from qrag_jax.llm.outcomes import Failure
from tests.llm.asking import MakeClient, chat, eventually, texts
from tests.llm.model_server import ModelServer, Reply


def test_a_server_killed_and_restarted_loses_nothing(
    server: ModelServer, make_client: MakeClient, said: list[str]
) -> None:
    server.script = lambda call: Reply(delay=0.02)
    client = make_client(concurrency=16, attempts=2, deadline=15.0, probe_pause=0.2)
    future = client.submit([chat(str(index)) for index in range(200)])
    assert eventually(lambda: len(server.calls) > 50)
    server.kill()
    before = len(server.calls)
    assert eventually(lambda: len(said) >= 3)  # pauses of 0.2, 0.4 and 0.8 s
    server.start()
    assert texts(future.result(60)) == [f"echo: {index}" for index in range(200)]
    assert before < 200
    # Asked twice is only what was under way when it died.
    assert len(server.calls) <= 200 + 16
    assert server.probes == 1
    waiting = f"the LLM server at {server.url} does not answer; waiting ("
    assert [line.startswith(waiting) for line in said] == [True] * (len(said) - 1) + [False]
    assert "answers again after" in said[-1]
    assert len(said) <= 6
    counters = client.counters()
    assert counters.waited_seconds > 0.5
    assert (counters.calls, counters.answers) == (200, 200)


def test_waiting_costs_neither_deadline_nor_attempts(
    server: ModelServer, make_client: MakeClient
) -> None:
    server.kill()
    client = make_client(deadline=2.0, attempts=1)
    future = client.submit([chat("a")])
    time.sleep(2.2)
    assert not future.done()
    server.start()
    assert texts(future.result(30)) == ["echo: a"]
    assert client.counters().retries == 0
    assert client.counters().latency.percentile(100) < 2.1


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
    assert isinstance(outcomes[0], Failure)
    assert f"{server.url} has not answered for 0.5 s (--llm.wait_limit)" in outcomes[0].message
    assert client.counters().failures["connection"] == 200
    assert len(said) <= 6
    # It is looked for on, and found.
    server.start()
    assert eventually(lambda: texts(client.ask_blocking([chat("a")])) == ["echo: a"])


def test_failures_in_a_row_stop_the_calls(
    server: ModelServer, make_client: MakeClient, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that lives but is broken: the probe answers 500 for as long as calls do."""
    broken = [True]
    monkeypatch.setattr(server, "probe_status", lambda: 500 if broken[0] else 200)
    server.script = lambda call: Reply(status=500 if broken[0] else 200)
    client = make_client(concurrency=4, breaker_failures=3, attempts=3)
    future = client.submit([chat(str(index)) for index in range(100)])
    assert eventually(lambda: len(said) >= 3)
    assert len(server.calls) <= 3 + 4
    broken[0] = False
    assert texts(future.result(30)) == [f"echo: {index}" for index in range(100)]


def test_a_server_whose_answers_alone_fail_does_not_hold_calls_for_ever(
    server: ModelServer, make_client: MakeClient
) -> None:
    server.script = lambda call: Reply(status=500)
    client = make_client(concurrency=4, breaker_failures=2, attempts=3)
    outcomes = client.ask_blocking([chat(str(index)) for index in range(20)])
    assert {(o.cause, o.attempts) for o in outcomes if isinstance(o, Failure)} == {("server", 3)}
    assert len(server.calls) == 60


def test_a_bad_request_does_not_count_as_an_outage(
    server: ModelServer, make_client: MakeClient
) -> None:
    server.script = lambda call: Reply(status=400)
    make_client(breaker_failures=2).ask_blocking([chat(str(index)) for index in range(50)])
    assert server.probes == 0
    assert len(server.calls) == 50

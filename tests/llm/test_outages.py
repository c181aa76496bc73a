"""A server that dies: calls wait without using up attempts, and all are answered at the end."""

from __future__ import annotations

import time

from qrag_jax.llm.outcomes import Failure
from tests.llm.asking import MakeClient, chat, eventually, texts
from tests.llm.model_server import ModelServer, Reply


def test_a_server_killed_and_restarted_loses_nothing(
    server: ModelServer, make_client: MakeClient, said: list[str]
) -> None:
    server.script = lambda call: Reply(delay=0.02)
    client = make_client(concurrency=16, attempts=2, deadline=15.0)
    future = client.submit([chat(str(index)) for index in range(200)])
    assert eventually(lambda: len(server.calls) > 50)
    server.kill()
    before = len(server.calls)
    assert eventually(lambda: len(said) >= 1)
    time.sleep(0.6)
    server.start()
    assert texts(future.result(60)) == [f"echo: {index}" for index in range(200)]
    assert before < 200
    # Asked twice is only what was under way when it died.
    assert len(server.calls) <= 200 + 16
    assert all(server.url in line for line in said)  # that it is down, now and then, and is back
    assert 2 <= len(said) <= 6
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
    server.start()
    assert eventually(lambda: texts(client.ask_blocking([chat("a")])) == ["echo: a"])

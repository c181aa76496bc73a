"""Attempts, deadlines and causes, as a server that misbehaves sees and meets them."""

from __future__ import annotations

import time

import pytest

from qrag_jax.llm import endpoint
from qrag_jax.llm.outcomes import Answer, CompletionRequest, Failure, Outcome
from tests.llm.asking import MakeClient, chat, texts
from tests.llm.model_server import Call, ModelServer, Reply


def only(outcomes: list[Outcome]) -> Failure:
    (outcome,) = outcomes
    assert isinstance(outcome, Failure), outcome
    return outcome


@pytest.mark.parametrize(
    ("fault", "cause", "message"),
    [
        (Reply(status=500, text="engine died"), "server", "HTTP 500: engine died"),
        (Reply(status=429), "rate_limit", "HTTP 429"),
        (Reply(drop=True), "connection", "disconnected"),
        (Reply(delay=30), "timeout", "no reply within 0.2 s"),
    ],
)
def test_errors_that_stay_use_up_the_attempts(
    server: ModelServer, make_client: MakeClient, fault: Reply, cause: str, message: str
) -> None:
    server.script = lambda call: fault
    client = make_client(attempts=3, attempt_timeout=0.2 if cause == "timeout" else 20.0)
    failure = only(client.ask_blocking([chat("a")]))
    assert (failure.cause, failure.attempts, len(server.calls)) == (cause, 3, 3)
    assert message in failure.message


@pytest.mark.parametrize(
    ("message", "cause"), [("no such model", "request"), ("exceeds the context size", "too_long")]
)
def test_what_the_request_is_to_blame_for_is_asked_once(
    server: ModelServer, make_client: MakeClient, message: str, cause: str
) -> None:
    server.script = lambda call: Reply(status=400, text=message)
    failure = only(make_client().ask_blocking([chat("a")]))
    assert failure == Failure(cause, f"HTTP 400: {message}", 1)
    assert len(server.calls) == 1


def test_faults_of_all_kinds_hit_only_their_own_requests(
    server: ModelServer, make_client: MakeClient
) -> None:
    faults = {
        0: Reply(status=500),
        1: Reply(status=429),
        2: Reply(drop=True),
        3: Reply(raw="{"),
        4: Reply(text=""),
        5: Reply(delay=30),
        6: Reply(status=400),
        7: Reply(choice={"finish_reason": "abort"}),
    }

    def script(call: Call) -> Reply:
        fault = faults.get(int(call.prompt) % 9, Reply())
        return Reply() if call.nth and fault.status != 400 else fault

    server.script = script
    client = make_client(attempt_timeout=1.5, concurrency=16)
    outcomes = client.ask_blocking([chat(str(index)) for index in range(90)])
    assert texts(outcomes) == [
        "request" if index % 9 == 6 else f"echo: {index}" for index in range(90)
    ]
    counters = client.counters()
    assert (counters.calls, counters.answers) == (90, 80)
    assert counters.failures == dict.fromkeys(counters.failures, 0) | {"request": 10}
    # On a busy machine other attempts may take too long as well.
    assert counters.retries == len(server.calls) - 90 >= 70


def test_the_deadline_holds_over_all_attempts(server: ModelServer, make_client: MakeClient) -> None:
    server.script = lambda call: Reply(delay=30)
    client = make_client(attempt_timeout=0.2, deadline=0.7, attempts=1000)
    started = time.monotonic()
    failure = only(client.ask_blocking([chat("a")]))
    assert failure.cause == "timeout"
    assert 0.5 < time.monotonic() - started < 5
    assert 2 <= failure.attempts == len(server.calls) <= 4


def test_a_storm_of_429_is_waited_out_as_the_server_asks(
    server: ModelServer, make_client: MakeClient
) -> None:
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
    refused = len(server.calls) - 40
    assert 8 <= refused <= 16  # with pauses of 0.01 s there would have been many more
    assert time.time() - began >= 1.0
    # A wait past the deadline is not begun.
    server.script = lambda call: Reply(status=429, headers={"Retry-After": "3600"})
    failure = only(client.ask_blocking([chat("a")]))
    assert (failure.cause, failure.attempts) == ("rate_limit", 1)
    assert time.time() - began < 10


def test_log_probabilities_of_both_kinds(server: ModelServer, make_client: MakeClient) -> None:
    def script(call: Call) -> Reply:
        if call.path.endswith("/chat/completions"):
            content = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]
            log_probs: dict[str, object] = {"content": content}
        else:
            log_probs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1]}
        return Reply("ab", choice={"logprobs": log_probs, "token_ids": [7, 8]})

    server.script = script
    chosen, completed = make_client().ask_blocking(
        [chat("x", log_probs=True), CompletionRequest("x", log_probs=True)]
    )
    assert chosen == completed
    assert isinstance(chosen, Answer)
    assert (chosen.log_probs, chosen.token_ids) == ((-0.5, -1.0), (7, 8))


def test_a_prompt_that_is_no_text_fails_alone(make_client: MakeClient) -> None:
    outcomes = make_client().ask_blocking([chat("a"), chat("half \ud800"), chat("b")])
    assert texts(outcomes) == ["echo: a", "request", "echo: b"]


def test_a_reply_without_end_is_not_read_to_it(
    server: ModelServer, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "LONGEST_REPLY", 100_000)
    server.script = lambda call: Reply("x" * (200_000 if call.prompt == "long" else 90_000))
    client = make_client(bad_answer_attempts=2)
    long, short = client.ask_blocking([chat("long"), chat("short")])
    assert isinstance(long, Failure)
    assert (long.cause, long.attempts) == ("malformed", 2)
    assert "the reply is longer than" in long.message
    assert isinstance(short, Answer)
    assert {call.headers["accept-encoding"] for call in server.calls} == {"identity"}
    # An error's body has no end either.
    server.script = lambda call: Reply(status=400, raw="x" * 200_000)
    failure = only(client.ask_blocking([chat("wrong")]))
    assert "longer than" in failure.message
    # A packed one could unpack to one without end.
    server.script = lambda call: Reply(headers={"Content-Encoding": "gzip"})
    failure = only(client.ask_blocking([chat("packed")]))
    assert failure.cause == "malformed"
    assert "packed" in failure.message

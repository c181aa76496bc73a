"""Requests and their keys, replies as outcomes whatever they are, and counts of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from qrag_jax.llm.outcomes import (
    CAUSES,
    Answer,
    ChatRequest,
    CompletionRequest,
    Counters,
    Failure,
    Outcome,
    Request,
    read_error,
    read_outcome,
    request_key,
)

MESSAGES = (("user", "a"),)


def read_reply(text: str, *, may_be_blank: bool = False) -> Outcome:
    extra = {"return_token_ids": True} if may_be_blank else {}
    return read_outcome(CompletionRequest("q", extra=extra), text, "")


def cause(outcome: Outcome) -> str:
    assert isinstance(outcome, Failure)
    assert len(outcome.message) < 400
    return outcome.cause


def reply(**choice: Any) -> str:
    """A completion with the text "a", with other fields in its choice."""
    return json.dumps({"choices": [{"text": "a", "finish_reason": "stop"} | choice]})


def test_keys_and_bodies_differ_by_whatever_changes_the_answer() -> None:
    changes: list[dict[str, Any]] = [{"max_tokens": 3}, {"seed": 1}, {"top_p": 0.5}]
    changes += [{"extra": {"top_k": 3}}, {"model": "model@2"}]
    requests: list[Request] = [ChatRequest(MESSAGES, **change) for change in ({}, *changes)]
    requests += [ChatRequest((("system", "a"),)), ChatRequest((*MESSAGES, *MESSAGES))]
    requests += [CompletionRequest("a"), CompletionRequest((1, 2))]
    requests += [CompletionRequest("a", log_probs=True)]
    keys = {request_key(request, "model", "1") for request in requests}
    keys |= {request_key(requests[0], "other", "1"), request_key(requests[0], "model", "2")}
    assert len(keys) == len(requests) + 2
    one = ChatRequest(MESSAGES, extra={"a": 1, "b": 2})
    other = ChatRequest(MESSAGES, extra={"b": 2, "a": 1})
    assert request_key(one, "model", "1") == request_key(other, "model", "1")
    usual = {"model": "m", "temperature": 0.0, "max_tokens": 256}
    assert CompletionRequest((1, 2), seed=3).body("m") == usual | {"prompt": [1, 2], "seed": 3}


def test_texts_of_replies() -> None:
    """Replies of any other form are in `tests/test_mutated_inputs.py`."""
    answer = read_reply(reply(logprobs={"token_logprobs": [-0.5, -1]}, token_ids=[7, 8]))
    assert answer == Answer("a", token_ids=(7, 8), log_probs=(-0.5, -1.0))
    several = json.dumps({"choices": [{"text": "a", "finish_reason": "stop"}] * 2})
    # Nor are ids or a text taken of what only looks like them.
    lies = [reply(token_ids=wrong) for wrong in ([math.inf], [7.5], [True], "78")]
    for text in (*lies, reply(text=7), reply(logprobs={"token_logprobs": ["-1"]}), several):
        assert cause(read_reply(text)) == "malformed", text
    assert read_reply(reply(text="a\ud800b")) == Answer("a\ufffdb")  # half a surrogate pair
    # The end of a turn alone is an answer where ids are asked for.
    ids = reply(text="", token_ids=[2])
    assert read_reply(ids, may_be_blank=True) == Answer("", token_ids=(2,))
    assert cause(read_reply(ids)) == "empty"


def test_a_text_that_ended_otherwise_is_no_answer() -> None:
    for reason, expected in (
        *(("abort", "broken_off"), ("content_filter", "filtered"), ("tool_calls", "tool_call")),
        *((None, "unknown_end"), (["stop"], "unknown_end"), ("x" * 10_000, "unknown_end")),
    ):
        # The cause is what the server said, also where there is no text besides.
        for text in ("a", None):
            assert cause(read_reply(reply(finish_reason=reason, text=text))) == expected


def test_errors_in_any_words() -> None:
    for status, text, expected in (
        *((502, "<h1>Bad gateway</h1>", "server"), (413, "", "too_long"), (404, "", "request")),
        (400, "This model's maximum context length is 256 tokens.", "too_long"),
        (400, "The prompt is longer than the maximum model length of 256.", "too_long"),
    ):
        assert read_error(status, text).cause == expected


# ---------------------------------------------------------------- counts


def test_counters_of_several_clients_are_those_of_one_that_did_all() -> None:
    outcomes: list[tuple[Outcome, float, int]] = [
        (Answer("a", tokens_in=5, tokens_out=2), 0.5, 3),
        (Answer("b", tokens_in=7, tokens_out=1), 30.0, 1),
        *((Failure(cause, "x", 2), 9.0, 2) for cause in (*CAUSES, "timeout")),
    ]
    together, whole = Counters(float), Counters(float)
    for outcome in outcomes:
        part = Counters(float)
        for counters in (part, whole):
            counters.called(*outcome)
        for name, count in part.items():
            together[name] += count
    metrics = together.as_metrics()
    assert metrics == whole.as_metrics()
    seconds = [metrics[f"llm/latency_p{percent}"] for percent in (50, 99)]
    assert seconds == pytest.approx([0.5, 30.0], rel=0.0101)
    failures = len(CAUSES) + 1
    counts = {"calls": failures + 2, "failures_timeout": 2, "failures_server": 1}
    counts |= {"retries": 2 + failures, "tokens_in": 12, "tokens_out": 3}
    assert {name: metrics[f"llm/{name}"] for name in counts} == counts

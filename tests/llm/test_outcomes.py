"""Requests and their keys, and the words of replies that tests of the client do not reach."""

from __future__ import annotations

import datetime
import email.utils
import json
import math
from typing import Any

import pytest

from qrag_jax.llm.outcomes import (
    LONGEST_WAIT,
    Answer,
    ChatRequest,
    CompletionRequest,
    Failure,
    Outcome,
    Request,
    RerankRequest,
    Usage,
    read_error,
    read_outcome,
    request_key,
    retry_after,
    shorten,
)

MESSAGES = (("user", "a"),)
WHOLE = {"text": "a", "finish_reason": "stop"}


def read_reply(text: str, *, model: str = "", may_be_blank: bool = False) -> Outcome:
    extra = {"return_token_ids": True} if may_be_blank else {}
    return read_outcome(CompletionRequest("q", model=model, extra=extra), text, "")


def cause(outcome: Outcome) -> str:
    assert isinstance(outcome, Failure)
    assert len(outcome.message) < 400
    return outcome.cause


def whole(**fields: Any) -> str:
    """A completion with `usage`, and with other fields in its choice."""
    usage = fields.pop("usage", {})
    return json.dumps({"choices": [WHOLE | fields], "usage": usage})


def test_keys_tell_apart_whatever_changes_the_answer() -> None:
    changes: list[dict[str, Any]] = [{"max_tokens": 3}, {"seed": 1}, {"top_p": 0.5}]
    changes += [{"log_probs": True}, {"extra": {"top_k": 3}}, {"model": "model@2"}]
    requests: list[Request] = [ChatRequest(MESSAGES, **change) for change in ({}, *changes)]
    requests += [ChatRequest((("system", "a"),)), ChatRequest((*MESSAGES, *MESSAGES))]
    requests += [CompletionRequest("a"), CompletionRequest((1, 2))]
    keys = {request_key(request, "model", "1") for request in requests}
    keys |= {request_key(requests[0], "other", "1"), request_key(requests[0], "model", "2")}
    assert len(keys) == len(requests) + 2
    one = ChatRequest(MESSAGES, extra={"a": 1, "b": 2})
    other = ChatRequest(MESSAGES, extra={"b": 2, "a": 1})
    assert request_key(one, "model", "1") == request_key(other, "model", "1")
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    "text",
    [
        '{"choices": "x"}',
        '{"choices": [{}]}',
        '{"choices": {"0": 1}}',
        "null",
        "[" * 100_000,
        whole(logprobs=3),
        whole(logprobs={"token_logprobs": ["one"]}),
        whole(token_ids=[math.inf]),
        whole(usage={"prompt_tokens": "many"}),
        json.dumps({"choices": [WHOLE] * 5000}),
    ],
)
def test_whatever_comes_is_a_value(text: str) -> None:
    assert cause(read_reply(text)) == "malformed"


def test_an_answer_of_another_model_than_asked() -> None:
    said = json.loads(whole())
    for fields in ({"model": "m@2"}, {}, {"model": ["m@3"]}):
        assert cause(read_reply(json.dumps(said | fields), model="m@3")) == "malformed"
        assert read_reply(json.dumps(said | fields)) == Answer("a")
    assert read_reply(json.dumps(said | {"model": "m@3"}), model="m@3") == Answer("a")


def test_the_end_of_a_turn_alone_is_an_answer_in_ids() -> None:
    ids = whole(text="", token_ids=[2])
    assert read_reply(ids, may_be_blank=True) == Answer("", token_ids=(2,))
    assert cause(read_reply(ids)) == "empty"
    assert cause(read_reply(whole(text=""), may_be_blank=True)) == "empty"


OTHER_ENDS = [
    ("abort", "broken_off"),
    ("error", "broken_off"),
    ("content_filter", "filtered"),
    ("tool_calls", "tool_call"),
    (None, "unknown_end"),
    ("STOP", "unknown_end"),
    (["stop"], "unknown_end"),
    ("x" * 10_000, "unknown_end"),
]


@pytest.mark.parametrize(("reason", "expected"), OTHER_ENDS)
def test_a_text_that_ended_otherwise_is_no_answer(reason: object, expected: str) -> None:
    # The cause is what the server said, also where there is no text besides.
    for said in ({"text": "Paris"}, {"message": {"content": "Paris"}}, {"text": None}):
        text = json.dumps({"choices": [{**said, "finish_reason": reason}]})
        assert cause(read_reply(text)) == expected


TOO_LONG = (
    "This model's maximum context length is 256 tokens. However, you requested 300 tokens.",
    "The decoder prompt (length 300) is longer than the maximum model length of 256.",
    "The input (300 tokens) is longer than the model's context length (256 tokens).",
    "the request exceeds the available context size, try increasing it",
)


def test_errors_in_any_words() -> None:
    for text in ("", "<h1>Bad gateway</h1>", "[]", '{"error": {}}', '"x"', "3"):
        assert read_error(502, text).cause == "server"
        assert read_error(413, text).cause == "too_long"
        assert read_error(404, text).cause == "request"
    assert {read_error(400, text).cause for text in TOO_LONG} == {"too_long"}


def test_seconds_that_a_server_asks_to_wait() -> None:
    now = datetime.datetime.now(datetime.UTC)
    later = email.utils.format_datetime(now + datetime.timedelta(seconds=60), usegmt=True)
    assert retry_after({"retry-after": "2.5"}) == 2.5
    assert 55 < retry_after({"retry-after": later}) <= 60
    for value in ("", "-3", "-1e400", "nan", "soon", "Mon, 01 Jan 2001 00:00:00 GMT"):
        assert retry_after({"retry-after": value}) == 0.0
    assert retry_after({}) == 0.0

    # A wait without end is longer than any deadline.
    dates = "Fri, 31 Dec 9999 23:59:59 GMT", f"Fri, 31 Dec {'9' * 20} 23:59:59 GMT"
    for value in ("1e400", "9" * 100_000, *dates):
        assert retry_after({"retry-after": value}) == LONGEST_WAIT


def test_half_a_surrogate_pair_in_a_reply() -> None:
    outcome = read_reply('{"choices": [{"text": "a\\ud800b", "finish_reason": "stop"}]}')
    assert outcome == Answer("a\ufffdb")
    read_error(400, '{"error": {"message": "no \\udfff"}}').message.encode()
    shorten("\ud800").encode()


def test_scores_of_documents_are_read_in_their_order() -> None:
    results = '[{"index": 1, "relevance_score": 0.25}, {"index": 0, "relevance_score": -3}]'
    request = RerankRequest("q", ("a", "b"), extra={"truncate_prompt_tokens": -1})
    assert request.body("tiny") == {
        "model": "tiny",
        "query": "q",
        "documents": ["a", "b"],
        "truncate_prompt_tokens": -1,
    }
    text = f'{{"results": {results}, "usage": {{"prompt_tokens": 7}}}}'
    outcome = read_outcome(request, text, "v1")
    assert outcome == Answer("[-3.0, 0.25]", version="v1", usage=Usage(prompt_tokens=7))
    three = RerankRequest("q", ("a", "b", "c"))
    assert isinstance(read_outcome(three, text, ""), Failure)

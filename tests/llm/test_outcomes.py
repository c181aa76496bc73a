"""Requests and their keys, and the words of replies that tests of the client do not reach."""

from __future__ import annotations

import datetime
import email.utils
import json
import math
from typing import Any

import pytest

from qrag_jax.llm.outcomes import (
    Answer,
    ChatRequest,
    CompletionRequest,
    Failure,
    Outcome,
    Request,
    RerankRequest,
    Usage,
    request_key,
)
from qrag_jax.llm.replies import (
    LONGEST_WAIT,
    read_error,
    read_outcome,
    retry_after,
    shorten,
)

MESSAGES = (("user", "a"),)
WHOLE = {"text": "a", "finish_reason": "stop"}


def read_reply(
    text: str, version: str = "", *, model: str = "", may_be_blank: bool = False
) -> Outcome:
    extra = {"return_token_ids": True} if may_be_blank else {}
    return read_outcome(CompletionRequest("q", model=model, extra=extra), text, version)


def whole(**fields: Any) -> str:
    """A completion with `usage`, and with other fields in its choice."""
    usage = fields.pop("usage", {})
    return json.dumps({"choices": [WHOLE | fields], "usage": usage})


def test_keys_tell_apart_whatever_changes_the_answer() -> None:
    requests: list[Request] = [
        ChatRequest(MESSAGES),
        ChatRequest((("system", "a"),)),
        ChatRequest((("user", "a"), ("user", "a"))),
        ChatRequest(MESSAGES, max_tokens=3),
        ChatRequest(MESSAGES, seed=1),
        ChatRequest(MESSAGES, top_p=0.5),
        ChatRequest(MESSAGES, log_probs=True),
        ChatRequest(MESSAGES, extra={"top_k": 3}),
        ChatRequest(MESSAGES, model="model@2"),
        CompletionRequest("a"),
        CompletionRequest((1, 2)),
    ]
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
        '{"choices": ["x"]}',
        '{"choices": [{}]}',
        '{"choices": {"0": 1}}',
        "null",
        "[" * 100_000,
        whole(logprobs=3),
        whole(logprobs={"token_logprobs": [1]}),
        whole(token_ids=[math.inf]),
        whole(usage={"prompt_tokens": "many"}),
        json.dumps({"choices": [WHOLE, WHOLE]}),
        json.dumps({"choices": [WHOLE] * 5000}),
    ],
)
def test_whatever_comes_is_a_value(text: str) -> None:
    outcome = read_reply(text, "")
    assert isinstance(outcome, Failure)
    assert outcome.cause == "malformed"
    assert len(outcome.message) < 400


def test_an_answer_of_another_model_than_asked() -> None:
    said = json.loads(whole())
    for fields, named in (({"model": "m@2"}, "m@2"), ({}, "None"), ({"model": ["m@3"]}, "m@3")):
        outcome = read_reply(json.dumps(said | fields), "", model="m@3")
        assert isinstance(outcome, Failure)
        assert outcome.cause == "malformed"
        assert outcome.message.startswith("the model m@3 was asked, and ")
        assert named in outcome.message
        assert read_reply(json.dumps(said | fields), "") == Answer("a")
    assert read_reply(json.dumps(said | {"model": "m@3"}), "", model="m@3") == Answer("a")


def test_the_end_of_a_turn_alone_is_an_answer_in_ids() -> None:
    ids = whole(text="", token_ids=[2])
    assert read_reply(ids, "", may_be_blank=True) == Answer("", token_ids=(2,))
    for reply, may_be_blank in ((ids, False), (whole(text=""), True)):
        outcome = read_reply(reply, "", may_be_blank=may_be_blank)
        assert isinstance(outcome, Failure)
        assert outcome.cause == "empty"


OTHER_ENDS = [
    ("abort", "broken_off"),
    ("error", "broken_off"),
    ("content_filter", "filtered"),
    ("tool_calls", "tool_call"),
    ("function_call", "tool_call"),
    (None, "unknown_end"),
    ("", "unknown_end"),
    ("eos_token", "unknown_end"),
    ("STOP", "unknown_end"),
    (["stop"], "unknown_end"),
    ({"stop": 1}, "unknown_end"),
    ("x" * 10_000, "unknown_end"),
]


@pytest.mark.parametrize(("reason", "cause"), OTHER_ENDS)
@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_a_text_that_ended_otherwise_is_no_answer(reason: object, cause: str, kind: str) -> None:
    said = {"text": "Paris"} if kind == "plain" else {"message": {"content": "Paris"}}
    outcome = read_reply(json.dumps({"choices": [{**said, "finish_reason": reason}]}), "")
    assert isinstance(outcome, Failure)
    assert outcome.cause == cause
    assert "finish_reason" in outcome.message
    assert len(outcome.message) < 400
    # Nor is one that has no text besides: the cause is what the server said.
    empty = read_reply(json.dumps({"choices": [{"text": None, "finish_reason": reason}]}), "")
    assert isinstance(empty, Failure)
    assert empty.cause == cause


@pytest.mark.parametrize("text", ["", "<h1>Bad gateway</h1>", "[]", '{"error": {}}', '"x"', "3"])
def test_errors_in_any_words(text: str) -> None:
    assert read_error(502, text).cause == "server"
    assert read_error(413, text).cause == "too_long"
    assert read_error(404, text).cause == "request"


def test_seconds_that_a_server_asks_to_wait() -> None:
    now = datetime.datetime.now(datetime.UTC)
    later = email.utils.format_datetime(now + datetime.timedelta(seconds=60), usegmt=True)
    assert retry_after({"retry-after": "2.5"}) == 2.5
    assert 55 < retry_after({"retry-after": later}) <= 60
    for value in ("", "-3", "-1e400", "nan", "soon", "Mon, 01 Jan 2001 00:00:00 GMT"):
        assert retry_after({"retry-after": value}) == 0.0
    assert retry_after({}) == 0.0


@pytest.mark.parametrize(
    "value",
    [
        "1e400",
        "inf",
        "9" * 250,
        "9" * 100_000,
        "1e308",
        "Fri, 31 Dec 9999 23:59:59 GMT",
        f"Fri, 31 Dec {'9' * 20} 23:59:59 GMT",
    ],
)
def test_a_wait_without_end_is_longer_than_any_deadline(value: str) -> None:
    assert retry_after({"retry-after": value}) == LONGEST_WAIT


def test_half_a_surrogate_pair_in_a_reply() -> None:
    outcome = read_reply('{"choices": [{"text": "a\\ud800b", "finish_reason": "stop"}]}', "")
    assert outcome == Answer("a\ufffdb")
    read_error(400, '{"error": {"message": "no \\udfff"}}').message.encode()
    shorten("\ud800").encode()


def test_scores_of_documents_are_read_in_their_order() -> None:
    results = '[{"index": 1, "relevance_score": 0.25}, {"index": 0, "relevance_score": -3}]'
    request = RerankRequest("q", ("a", "b"))
    text = f'{{"results": {results}, "usage": {{"prompt_tokens": 7}}}}'
    outcome = read_outcome(request, text, "v1")
    assert outcome == Answer("[-3.0, 0.25]", version="v1", usage=Usage(prompt_tokens=7))
    three = RerankRequest("q", ("a", "b", "c"))
    assert isinstance(read_outcome(three, text, ""), Failure)


def test_a_rerank_request_has_documents_and_its_own_fields() -> None:
    request = RerankRequest("q", ("a", "b"), extra={"truncate_prompt_tokens": -1})
    assert request.body("tiny") == {
        "model": "tiny",
        "query": "q",
        "documents": ["a", "b"],
        "truncate_prompt_tokens": -1,
    }
    assert request_key(request, "tiny", "") != request_key(RerankRequest("q", ("a",)), "tiny", "")

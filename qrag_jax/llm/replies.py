"""Reads a server's replies: each one is an answer or a failure."""

from __future__ import annotations

import datetime
import email.utils
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from qrag_jax.llm.outcomes import (
    ENDS,
    Answer,
    Embedded,
    EmbeddingRequest,
    Failure,
    Outcome,
    Request,
    RerankRequest,
    Sampling,
    Usage,
)
from qrag_jax.llm.text.extraction import well_formed

_LONGEST_MESSAGE = 300
LONGEST_WAIT = 365 * 86_400.0  # seconds

# How vLLM, SGLang, llama.cpp and OpenAI say that prompt and answer do not fit.
_TOO_LONG = re.compile(
    r"context.?(length|window|size)|maximum model length|max_model_len|longer than the model",
    re.IGNORECASE,
)


def read_outcome(request: Request, text: str, version: str) -> Outcome:
    """What a reply to this request says: an answer, or why there is none."""
    try:
        reply = json.loads(text)
        if isinstance(request, EmbeddingRequest):
            return _vectors(reply, version, len(request.rows))
        if isinstance(request, RerankRequest):
            return _scores(reply, version, len(request.documents))
        return _completion(reply, version, request)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError):
        return Failure("malformed", f"the reply is not what was asked for: {shorten(text)}")


def _vectors(reply: Any, version: str, count: int) -> Outcome:
    rows = sorted(reply["data"], key=lambda row: row["index"])
    vectors = tuple(tuple(map(float, row["embedding"])) for row in rows)
    one_each = [row["index"] for row in rows] == list(range(count))
    if not one_each or len({len(vector) for vector in vectors}) > 1:
        return Failure("malformed", f"the reply has not one vector for each of {count} rows")
    return Embedded("", version, usage=_usage(reply), vectors=vectors)


def _scores(reply: Any, version: str, documents: int) -> Outcome:
    found = {row["index"]: float(row["relevance_score"]) for row in reply["results"]}
    if len(reply["results"]) != documents or found.keys() != set(range(documents)):
        return Failure("malformed", f"the reply does not score all {documents} documents, once")
    scores = [found[index] for index in range(documents)]
    if not all(map(math.isfinite, scores)):
        return Failure("malformed", "a score is NaN or infinite")
    return Answer(text=json.dumps(scores), version=version, usage=_usage(reply))


def _completion(reply: Any, version: str, request: Sampling) -> Outcome:
    choices, model = reply["choices"], request.model
    if model and reply.get("model") != model:
        named = shorten(str(reply.get("model")))
        return Failure("malformed", f"the model {model} was asked, and {named} answered")
    if isinstance(choices, list) and len(choices) > 1:
        return Failure("malformed", f"the reply has {len(choices)} choices instead of one")
    choice = choices[0]
    content = choice["message"]["content"] if "message" in choice else choice["text"]
    if failure := _ended_otherwise(choice.get("finish_reason")):
        return failure
    if content and not isinstance(content, str):
        raise TypeError("the text is no string")
    answer = Answer(
        text=well_formed(content or ""),
        version=version,
        finish_reason=choice["finish_reason"],
        usage=_usage(reply),
        token_ids=tuple(map(int, choice.get("token_ids") or ())),
        **_log_probs(choice.get("logprobs") or {}),
    )
    # Token ids without text are an answer, such as the end of a turn alone.
    if not answer.text.strip() and not (request.wants_ids and answer.token_ids):
        return Failure("empty", f"the answer is blank (finish_reason {answer.finish_reason})")
    return answer


def _ended_otherwise(reason: Any) -> Failure | None:
    """The failure that a `finish_reason` stands for; None if it is that of an answer."""
    if reason in ENDS:
        return None
    named = f"finish_reason {shorten(str(reason))}"
    if reason in ("abort", "error"):
        return Failure("broken_off", f"the server broke the answer off ({named})")
    if reason == "content_filter":
        return Failure("filtered", f"the server's filter withheld the answer ({named})")
    if reason in ("tool_calls", "function_call"):
        return Failure("tool_call", f"the model called a tool, and none was offered ({named})")
    return Failure("unknown_end", f"the server does not say that the answer is whole ({named})")


def read_error(status: int, text: str) -> Failure:
    if status < 400:
        return Failure("request", f"HTTP {status}: a redirect is not followed; give its target")
    message = f"HTTP {status}: {_error_message(text)}"
    if status >= 500:
        return Failure("server", message)
    if status == 429:
        return Failure("rate_limit", message)
    if status == 413 or (status in (400, 422) and _TOO_LONG.search(text)):
        return Failure("too_long", message)
    return Failure("request", message)


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait (RFC 9110, 10.2.3); 0 if it does not say.

    A larger number or a later date becomes `LONGEST_WAIT`. This is longer than a deadline, so the
    request fails without waiting.
    """
    value = headers.get("retry-after", "")[:_LONGEST_MESSAGE].strip()
    try:
        if re.match(r"[A-Za-z]", value) and "," in value:
            when = email.utils.parsedate_to_datetime(value)
            seconds = when.replace(tzinfo=when.tzinfo or datetime.UTC).timestamp() - time.time()
        else:
            seconds = float(value)
    except (ValueError, TypeError, IndexError):
        return 0.0
    except OverflowError:  # a year that `datetime` cannot represent
        return LONGEST_WAIT
    return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_WAIT)


def shorten(text: str) -> str:
    """The text on one line, cut to a length that suits a log, and safe to print."""
    text = " ".join(well_formed(text[: 100 * _LONGEST_MESSAGE]).split())
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"


def _error_message(text: str) -> str:
    try:
        reply = json.loads(text)
        error = reply.get("error", reply)
        return shorten(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, RecursionError, KeyError, AttributeError):
        return shorten(text)


def _usage(reply: Mapping[str, Any]) -> Usage:
    usage = reply.get("usage") or {}
    return Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))


def _log_probs(log_probs: Mapping[str, Any]) -> dict[str, Any]:
    """`tokens` and `log_probs` of an Answer; chat and plain completions write them differently."""
    if "token_logprobs" in log_probs:
        tokens, values = log_probs["tokens"], log_probs["token_logprobs"]
    else:
        content = log_probs.get("content") or []
        tokens = [entry["token"] for entry in content]
        values = [entry["logprob"] for entry in content]
    # The first token of an echoed prompt has no log-probability.
    values = [math.nan if value is None else float(value) for value in values]
    return {
        "tokens": tuple(well_formed(str(token)) for token in tokens),
        "log_probs": tuple(values),
    }

"""Requests to a language model, replies read as outcomes (answers or failures), and counts."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from qrag_jax.errors import Natural
from qrag_jax.runtime.bounded_json import Foreign, Some, typed

# Why there is no answer. The last four depend on the reply's `finish_reason`.
CAUSES = (
    "timeout",  # no reply in time
    "connection",  # no connection
    "server",  # HTTP 5xx
    "rate_limit",  # HTTP 429
    "request",  # another HTTP error, or a prompt that cannot be sent
    "malformed",  # the reply is not a completion, or not the scores of all documents
    "empty",  # a completion without text
    "too_long",  # the prompt is longer than the model's context
    "broken_off",  # the server broke the text off
    "filtered",  # the server's filter withheld the text
    "tool_call",  # the model called a tool
    "unknown_end",  # the server gives no reason, or an unknown one
)
# Why a text holds no answer: the thinking has no end, max_tokens cut off the answer, there is
# nothing to read, or the verdict is neither yes nor no.
NO_ANSWER_CAUSES = ("unfinished_thinking", "cut_off", "no_text", "unclear_verdict")
# The `finish_reason` of an answer: the text ended by itself, or at max_tokens.
ENDS = ("stop", "length")

_LONGEST_MESSAGE = 300

# How vLLM, SGLang, llama.cpp and OpenAI say that prompt and answer do not fit.
_TOO_LONG = re.compile(
    r"context.?(length|window|size)|maximum model length|max_model_len|longer than the model",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer of the model; ids and log-probabilities are empty if the server gave none."""

    # the text; blank only if the request asked for token ids or vectors. The scores of a
    # `RerankRequest`
    text: str
    # of the weights that sampled it; "" if unknown, if the weights changed meanwhile, or if the
    # request named another model than the client's
    version: str = ""
    finish_reason: str = "stop"  # "stop", or "length" if max_tokens cut it off
    tokens_in: int = 0  # of the prompt, as the server counted them; 0 if it did not say
    tokens_out: int = 0  # of the answer, likewise
    # `[token]` ids; vLLM gives them with `extra={"return_token_ids": True}`
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # `[token]` log-probabilities in nats
    vectors: tuple[tuple[float, ...], ...] = ()  # `[row][width]` of an `EmbeddingRequest`


@dataclasses.dataclass(frozen=True)
class Failure:
    """A call without an answer, or a text that cannot be read as one."""

    cause: str  # one of `CAUSES`; of a text, one of `NO_ANSWER_CAUSES`
    message: str  # one sentence, with the server's error message if there is one
    # how often the server was asked; attempts that failed in an outage do not count
    attempts: int = 1


Outcome = Answer | Failure

# How the asker reads an answer: as the prompt wants it, without the mark that the prompt asks for,
# or not at all.
READ, UNMARKED, UNREAD = "read", "unmarked", "unread"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of an answer; the base class of both kinds of request."""

    temperature: float = 0.0  # 0 is greedy; only greedy answers are cached
    max_tokens: int = 256  # longest answer
    seed: int | None = None  # of the sampling, if the server supports one
    top_p: float | None = None  # nucleus sampling; None leaves it to the server
    # the name to ask for, such as one version's; an answer of another model is a failure. "": the
    # client's model
    model: str = ""
    # further fields of the body, such as vLLM's `{"chat_template_kwargs": …}`; they override the
    # other fields
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    # says which of `READ`, `UNMARKED` and `UNREAD` an answer is. An unread answer is counted and
    # never cached: a server that is mended would not be asked again
    reads: Callable[[Answer], str] | None = dataclasses.field(default=None, compare=False)

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy, so that the same request has the same answer."""
        return self.extra.get("temperature", self.temperature) == 0

    def _body(self, model: str, **more: Any) -> dict[str, Any]:
        body = {"model": self.model or model, "temperature": self.temperature, **more}
        body |= {"max_tokens": self.max_tokens, "seed": self.seed, "top_p": self.top_p}
        return {name: value for name, value in body.items() if value is not None} | dict(self.extra)


@dataclasses.dataclass(frozen=True)
class ChatRequest(Sampling):
    """A conversation that the model continues; messages are (role, content) pairs."""

    messages: tuple[tuple[str, str], ...]

    path = "/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        messages = [{"role": role, "content": content} for role, content in self.messages]
        return self._body(model, messages=messages)


@dataclasses.dataclass(frozen=True)
class CompletionRequest(Sampling):
    """A text, or its token ids, that the model continues."""

    prompt: str | tuple[int, ...]
    log_probs: bool = dataclasses.field(default=False, kw_only=True)  # whether to ask for them

    path = "/completions"

    def body(self, model: str) -> dict[str, Any]:
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return self._body(model, prompt=prompt, logprobs=1 if self.log_probs else None)


@dataclasses.dataclass(frozen=True)
class RerankRequest:
    """Documents that a cross-encoder scores for a query: `/rerank` of vLLM, Cohere and Jina.

    The answer's text is a JSON list of scores, one for each document, in their order.
    """

    query: str
    documents: tuple[str, ...]  # one at least

    path = "/rerank"
    greedy = True  # the same request has the same answer

    def body(self, model: str) -> dict[str, Any]:
        return {"model": model, "query": self.query, "documents": list(self.documents)}


@dataclasses.dataclass(frozen=True)
class EmbeddingRequest:
    """Rows of token ids, of each of which the model gives one vector.

    Ids and not texts: the server then adds no special tokens and tokenises nothing again.
    """

    rows: tuple[tuple[int, ...], ...]

    path = "/embeddings"
    greedy = False  # so that vectors, which are large, are not kept

    def body(self, model: str) -> dict[str, Any]:
        rows = [list(row) for row in self.rows]
        return {"model": model, "input": rows, "encoding_format": "float"}


Request = ChatRequest | CompletionRequest | RerankRequest | EmbeddingRequest


def how_read(request: Request, outcome: Outcome | None) -> str:
    """`READ`, `UNMARKED` or `UNREAD`; what is no answer, or nobody reads, is `READ`."""
    reads = request.reads if isinstance(request, Sampling) else None
    return reads(outcome) if reads is not None and isinstance(outcome, Answer) else READ


def reads_by(read: Callable[[Answer], Any]) -> Callable[[Answer], str]:
    """For `Sampling.reads`: an answer is unread if `read` gives None or a `Failure` of it."""
    return lambda answer: UNREAD if isinstance(read(answer), Failure | None) else READ


def request_key(request: Request, model: str, version: str) -> str:
    """SHA-256 of model, version, prompt and parameters; requests with the same key share an answer.

    `model` and `version` (of its weights) are the client's.
    """
    fields = [request.path, version, request.body(model)]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- replies
# The parts that are read; what else a server says is ignored.


@dataclasses.dataclass(frozen=True)
class _Usage(Foreign):
    prompt_tokens: Natural | None = None
    completion_tokens: Natural | None = None


@dataclasses.dataclass(frozen=True)
class _Message(Foreign):
    content: str | None


@dataclasses.dataclass(frozen=True)
class _LogProbs(Foreign):
    token_logprobs: Some[float] | None = None


@dataclasses.dataclass(frozen=True)
class _Choice(Foreign):
    finish_reason: Any
    message: _Message | None = None  # in a chat
    text: str | None = None
    token_ids: Some[int] | None = None
    logprobs: _LogProbs | None = None


@dataclasses.dataclass(frozen=True)
class _Row(Foreign):
    index: int
    embedding: Some[float] = ()
    relevance_score: float | None = None


@dataclasses.dataclass(frozen=True)
class _Reply(Foreign):
    model: Any = None
    choices: Some[_Choice] = ()
    data: Some[_Row] = ()  # vectors
    results: Some[_Row] = ()  # scores
    usage: _Usage | None = None

    def answer(self, text: str, version: str, **fields: Any) -> Answer:
        usage = self.usage or _Usage()
        tokens_in, tokens_out = usage.prompt_tokens or 0, usage.completion_tokens or 0
        return Answer(text, version, tokens_in=tokens_in, tokens_out=tokens_out, **fields)


def read_outcome(request: Request, text: str, version: str) -> Outcome:
    try:
        # Escapes may stand for halves of surrogate pairs, which UTF-8 has not.
        if "\\u" in text:
            text = well_formed(json.dumps(json.loads(text), ensure_ascii=False))
        reply = typed(_Reply, text.encode())
    except (ValueError, RecursionError) as error:
        return Failure("malformed", shorten(f"the reply is not what was asked for: {error}"))
    if isinstance(request, EmbeddingRequest):
        return _vectors(reply, version, len(request.rows))
    if isinstance(request, RerankRequest):
        return _scores(reply, version, len(request.documents))
    return _completion(reply, version, request)


def _vectors(reply: _Reply, version: str, count: int) -> Outcome:
    rows = sorted(reply.data, key=lambda row: row.index)
    widths = {len(row.embedding) for row in rows}
    if [row.index for row in rows] != list(range(count)) or len(widths) > 1 or 0 in widths:
        return Failure("malformed", f"the reply has not one vector for each of {count} rows")
    return reply.answer("", version, vectors=tuple(row.embedding for row in rows))


def _scores(reply: _Reply, version: str, documents: int) -> Outcome:
    rows = sorted(reply.results, key=lambda row: row.index)
    scores = [row.relevance_score for row in rows]
    if [row.index for row in rows] != list(range(documents)) or None in scores:
        return Failure("malformed", f"the reply does not score all {documents} documents, once")
    return reply.answer(json.dumps(scores), version)


def _completion(reply: _Reply, version: str, request: Sampling) -> Outcome:
    if request.model and reply.model != request.model:
        named = shorten(str(reply.model))
        return Failure("malformed", f"the model {request.model} was asked, and {named} answered")
    if len(reply.choices) != 1:
        return Failure("malformed", f"the reply has {len(reply.choices)} choices instead of one")
    (choice,) = reply.choices
    if (reason := choice.finish_reason) not in ENDS:
        cause, message = _OTHER_ENDS.get(str(reason), _UNKNOWN_END)
        return Failure(cause, f"{message} (finish_reason {shorten(str(reason))})")
    text = (choice.text if choice.message is None else choice.message.content) or ""
    ids, log_probs = choice.token_ids or (), choice.logprobs and choice.logprobs.token_logprobs
    # Token ids without text are an answer, such as the end of a turn alone.
    if not text.strip() and not (request.extra.get("return_token_ids") and ids):
        return Failure("empty", f"the answer is blank (finish_reason {reason})")
    fields = {"finish_reason": reason, "token_ids": ids, "log_probs": log_probs or ()}
    return reply.answer(text, version, **fields)


_BROKEN_OFF = "broken_off", "the server broke the answer off"
_TOOL_CALL = "tool_call", "the model called a tool, and none was offered"
_OTHER_ENDS = {
    "abort": _BROKEN_OFF,
    "error": _BROKEN_OFF,
    "content_filter": ("filtered", "the server's filter withheld the answer"),
    "tool_calls": _TOOL_CALL,
    "function_call": _TOOL_CALL,
}
_UNKNOWN_END = "unknown_end", "the server does not say that the answer is whole"


def read_error(status: int, text: str) -> Failure:
    if status < 400:
        return Failure("request", f"HTTP {status}: a redirect is not followed; give its target")
    try:
        reply = json.loads(text)
        error = reply.get("error", reply)
        said = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, RecursionError, KeyError, AttributeError):
        said = text
    cause = "server" if status >= 500 else "rate_limit" if status == 429 else "request"
    if status == 413 or (status in (400, 422) and _TOO_LONG.search(text)):
        cause = "too_long"
    return Failure(cause, f"HTTP {status}: {shorten(said)}")


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait; 0 if it gives none (a date is not read)."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return 0.0
    return seconds if seconds > 0 else 0.0


def well_formed(text: str) -> str:
    """The text with the two halves of each pair joined, and with U+FFFD for each half alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def shorten(text: str) -> str:
    """The text on one line, cut to a length that suits a log, and safe to print."""
    text = " ".join(well_formed(text[: 100 * _LONGEST_MESSAGE]).split())
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"


# ---------------------------------------------------------------- counts


COUNTED = (
    "calls",  # requests for the server, without what the cache or a request in flight answered
    "answers",  # calls that got an answer
    "retries",  # attempts after the first one of each call
    "tokens_in",  # of answered prompts, as the server counts them
    "tokens_out",  # of answers
    "cache_hits",  # answers from the cache on disk
    "cache_skipped",  # not looked up or kept because another process held the cache's file
    "shared",  # requests that got the answer of an identical one in flight
    "unread",  # answers, cached ones too, that the asker could not read (`Sampling.reads`)
    "unmarked",  # answers without the mark that the prompt asks for, whose last line was read
    "waited_seconds",  # of outages, during which calls waited
    *(f"failures_{cause}" for cause in CAUSES),  # calls that failed
)


_LATENCY, _GROWTH = "latency/", math.log(1.02)


class Counters(collections.defaultdict[str, float]):
    """Sums since a client was created, by the names of `COUNTED`; its thread alone changes them.

    The names `latency/BUCKET` are a histogram of the seconds from a call's first attempt to its
    answer, without the time spent waiting for a server that was down. Buckets grow by 2 %, so
    percentiles are accurate to 1 %, also of several clients' sums.
    """

    def called(self, outcome: Outcome, seconds: float, attempts: int) -> None:
        self["calls"] += 1
        self["retries"] += max(attempts - 1, 0)
        if isinstance(outcome, Failure):
            self[f"failures_{outcome.cause}"] += 1
            return
        self["answers"] += 1
        self["tokens_in"] += outcome.tokens_in
        self["tokens_out"] += outcome.tokens_out
        self[f"{_LATENCY}{round(math.log(max(seconds, 1e-4)) / _GROWTH)}"] += 1

    def latency(self, percent: float) -> float:
        """The seconds that `percent` % of all answers do not exceed; 0 if there are none."""
        rank = math.ceil(self["answers"] * percent / 100)
        for bucket in sorted(int(n.removeprefix(_LATENCY)) for n in self if _LATENCY in n):
            rank -= int(self[f"{_LATENCY}{bucket}"])
            if rank <= 0:
                return math.exp(bucket * _GROWTH)
        return 0.0

    def as_metrics(self) -> dict[str, float]:
        """All counters, under names for the metric writers; times in seconds."""
        metrics = {name: self[name] for name in COUNTED}
        metrics["failures"] = sum(self[f"failures_{cause}"] for cause in CAUSES)
        metrics |= {f"latency_p{p}": self.latency(p) for p in (50, 90, 99)}
        return {f"llm/{name}": value for name, value in metrics.items()}

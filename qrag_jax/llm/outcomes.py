"""Requests to a language model, their outcomes (an answer or a failure), and counts of these."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
# The `finish_reason` of an answer: the text ended by itself, or at max_tokens.
ENDS = ("stop", "length")


@dataclasses.dataclass(frozen=True)
class Usage:
    """Numbers of tokens as the server counted them; 0 if it did not report them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer of the model; the last three fields are empty if the server did not give them."""

    # the text; blank only if the request asked for token ids. The scores of a `RerankRequest`
    text: str
    # of the weights that sampled it; "" if unknown, if the weights changed meanwhile, or if the
    # request named another model than the client's
    version: str = ""
    finish_reason: str = "stop"  # "stop", or "length" if max_tokens cut it off
    usage: Usage = Usage()  # tokens of prompt and answer
    cached: bool = False  # whether it comes from the cache on disk
    tokens: tuple[str, ...] = ()  # `[token]` strings
    # `[token]` ids; vLLM gives them with `extra={"return_token_ids": True}`
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # `[token]` log-probabilities in nats


@dataclasses.dataclass(frozen=True)
class Embedded(Answer):
    """The answer to an `EmbeddingRequest`: it has vectors and no text."""

    vectors: tuple[tuple[float, ...], ...] = ()  # `[row][width]`


@dataclasses.dataclass(frozen=True)
class Failure:
    cause: str  # one of `CAUSES`
    message: str  # one sentence, with the server's error message if there is one
    # how often the server was asked; attempts that failed in an outage do not count
    attempts: int = 1


Outcome = Answer | Failure

# How the asker reads an answer: as the prompt wants it, without the mark that the prompt asks for,
# or not at all.
READ, UNMARKED, UNREAD = "read", "unmarked", "unread"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an answer; the base class of both kinds of request.

    Attributes:
        reads: says which of `READ`, `UNMARKED` and `UNREAD` an answer is. An unread answer is
            counted and never cached: a server that is mended would not be asked again.
    """

    # 0 is greedy; only greedy answers are cached
    temperature: float = dataclasses.field(default=0.0, kw_only=True)
    max_tokens: int = dataclasses.field(default=256, kw_only=True)  # longest answer
    # of the sampling, if the server supports one
    seed: int | None = dataclasses.field(default=None, kw_only=True)
    # nucleus sampling; None leaves it to the server
    top_p: float | None = dataclasses.field(default=None, kw_only=True)
    # whether to ask for the answer's tokens and their log-probabilities
    log_probs: bool = dataclasses.field(default=False, kw_only=True)
    # the name to ask for, such as one version's; an answer of another model is a failure. "": the
    # client's model
    model: str = dataclasses.field(default="", kw_only=True)
    # further fields of the body, such as vLLM's `{"chat_template_kwargs": …}`; they override the
    # other fields
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True, hash=False)
    reads: Callable[[Answer], str] | None = dataclasses.field(
        default=None, kw_only=True, compare=False
    )

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy, so that the same request has the same answer."""
        return self.extra.get("temperature", self.temperature) == 0

    @property
    def wants_ids(self) -> bool:
        """Whether the answer is token ids, whatever their text."""
        return bool(self.extra.get("return_token_ids"))

    def _body(self, model: str, log_probs: bool | int, **prompt: Any) -> dict[str, Any]:
        body = {"model": self.model or model, "temperature": self.temperature, **prompt}
        body |= {"max_tokens": self.max_tokens, "seed": self.seed, "top_p": self.top_p}
        body["logprobs"] = log_probs if self.log_probs else None
        return {name: value for name, value in body.items() if value is not None} | dict(self.extra)


@dataclasses.dataclass(frozen=True)
class ChatRequest(Sampling):
    """A conversation that the model continues; messages are (role, content) pairs."""

    messages: tuple[tuple[str, str], ...]

    path = "/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        messages = [{"role": role, "content": content} for role, content in self.messages]
        return self._body(model, True, messages=messages)


@dataclasses.dataclass(frozen=True)
class CompletionRequest(Sampling):
    """A text, or its token ids, that the model continues."""

    prompt: str | tuple[int, ...]

    path = "/completions"

    def body(self, model: str) -> dict[str, Any]:
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return self._body(model, 1, prompt=prompt)


@dataclasses.dataclass(frozen=True)
class RerankRequest:
    """Documents that a cross-encoder scores for a query: `/rerank` of vLLM, Cohere and Jina.

    The answer's text is a JSON list of scores, one for each document, in their order.
    """

    query: str  # the query
    documents: tuple[str, ...]  # the documents, one at least
    # further fields of the body, such as vLLM's `{"truncate_prompt_tokens": -1}`
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True, hash=False)

    path = "/rerank"
    greedy = True  # the same request has the same answer

    def body(self, model: str) -> dict[str, Any]:
        body = {"model": model, "query": self.query, "documents": list(self.documents)}
        return body | dict(self.extra)


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


def request_key(request: Request, model: str, version: str) -> bytes:
    """SHA-256 of model, version, prompt and parameters; requests with the same key share an answer.

    `model` and `version` (of its weights) are the client's.
    """
    fields = [request.path, version, request.body(model)]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


class Latencies(collections.Counter[int]):
    """A histogram of seconds. Its buckets grow by 2 %, so percentiles are accurate to 1 %.

    The buckets cover 0.1 ms to one day. The first and the last one also count what lies beyond.
    """

    _SHORTEST, _LONGEST, _GROWTH = 1e-4, 86_400.0, math.log(1.02)

    def add(self, seconds: float) -> None:
        seconds = min(max(seconds, self._SHORTEST), self._LONGEST)
        self[int(math.log(seconds / self._SHORTEST) / self._GROWTH)] += 1

    def percentile(self, percent: float) -> float:
        """The duration in seconds that `percent` % of all do not exceed; 0 if there are none."""
        rank = math.ceil(self.total() * percent / 100)
        for bucket in sorted(self):
            rank -= self[bucket]
            if rank <= 0:
                return self._SHORTEST * math.exp((bucket + 0.5) * self._GROWTH)
        return 0.0


@dataclasses.dataclass
class Counters:
    """Sums since the client was made; only the client's thread changes them.

    Attributes:
        tokens_in, tokens_out: tokens of answered prompts and of answers, as the server counts them.
    """

    # requests for the server, without those answered by the cache or by an identical request in
    # flight
    calls: int = 0
    answers: int = 0  # calls that got an answer
    # calls that failed, by cause
    failures: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    retries: int = 0  # attempts after the first one of each call
    # seconds from a call's first attempt to its answer, without the time spent waiting for a server
    # that was down
    latency: Latencies = dataclasses.field(default_factory=Latencies)
    tokens_in: int = 0
    tokens_out: int = 0
    cache_hits: int = 0  # answers from the cache on disk
    # answers not looked up or kept because another process held the cache's file
    cache_skipped: int = 0
    shared: int = 0  # requests that got the answer of an identical one in flight
    unread: int = 0  # answers, cached ones too, that the asker could not read (`Sampling.reads`)
    unmarked: int = 0  # answers without the mark that the prompt asks for, whose last line was read
    waited_seconds: float = 0.0  # seconds of outages, during which calls waited

    def called(self, outcome: Outcome, seconds: float, attempts: int) -> None:
        self.calls += 1
        self.retries += max(attempts - 1, 0)
        if isinstance(outcome, Failure):
            self.failures[outcome.cause] += 1
            return
        self.answers += 1
        self.latency.add(seconds)
        self.tokens_in += outcome.usage.prompt_tokens
        self.tokens_out += outcome.usage.completion_tokens

    def as_text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def of_all(cls, texts: Iterable[str]) -> Counters:
        """The counters of several clients, such as those of all hosts, together."""
        together = cls()
        for fields in map(json.loads, texts):
            together.latency.update({int(k): n for k, n in fields.pop("latency").items()})
            for cause, count in fields.pop("failures").items():
                together.failures[cause] += count
            for name, value in fields.items():
                setattr(together, name, getattr(together, name) + value)
        return together

    def as_metrics(self) -> dict[str, float]:
        """All counters, under names for the metric writers; times in seconds."""
        metrics = vars(self) | {"failures": sum(self.failures.values())}
        metrics |= {f"failures_{cause}": count for cause, count in self.failures.items()}
        metrics |= {f"latency_p{p}": self.latency.percentile(p) for p in (50, 90, 99)}
        del metrics["latency"]
        return {f"llm/{name}": float(value) for name, value in metrics.items()}

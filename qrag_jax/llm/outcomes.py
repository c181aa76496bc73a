"""What a language model is asked, and the two things that come back: an answer or a failure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Why there is no answer: no reply in time, no connection, 5xx, 429, another 4xx, a reply that is
# no completion, a completion without text, a prompt longer than the model's context; or the server
# ended the text for a reason of its own (`finish_reason`): it broke it off, its filter withheld it,
# the model called a tool, it does not say why or gives a reason that nobody knows.
CAUSES = (
    "timeout",
    "connection",
    "server",
    "rate_limit",
    "request",
    "malformed",
    "empty",
    "too_long",
    "broken_off",
    "filtered",
    "tool_call",
    "unknown_end",
)
# How a text ends that is an answer: by itself, or at max_tokens.
ENDS = ("stop", "length")

# Fields of the body that `extra` may not set: one answer, whole, to the request's own prompt.
_OWN_FIELDS = ("model", "messages", "prompt", "n", "stream")


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens the server counted, 0 where it did not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model said.

    Attributes:
        text: its words, never blank.
        version: of the weights it was sampled with; "" where unknown, or changed meanwhile.
        finish_reason: "stop", or "length" where max_tokens cut it.
        usage: tokens of prompt and answer.
        cached: it comes from the cache on disk.
        tokens, token_ids, log_probs: `[token]` each, empty where the server did not give them.
            Ids come with `extra={"return_token_ids": True}` (vLLM), log-probabilities are in nats.
    """

    text: str
    version: str = ""
    finish_reason: str = "stop"
    usage: Usage = Usage()
    cached: bool = False
    tokens: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why there is no answer.

    Attributes:
        cause: one of `CAUSES`. message: one sentence, with the server's words where there are any.
        attempts: times the server was asked, not counting those that a dead server took.
    """

    cause: str
    message: str
    attempts: int = 1

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise ValueError(f"a failure's cause is one of {', '.join(CAUSES)}, not {self.cause}.")


Outcome = Answer | Failure


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How an answer is drawn; the base of both kinds of request.

    Attributes:
        temperature: 0 is greedy; only such answers are cached.
        max_tokens: longest answer. seed: of the draw, where the server takes one.
        top_p: nucleus, None leaves it to the server.
        log_probs: ask for the tokens of the answer with their log-probabilities.
        extra: further fields of the body, such as vLLM's `{"chat_template_kwargs": …}`; they win
            over the others.
    """

    temperature: float = dataclasses.field(default=0.0, kw_only=True)
    max_tokens: int = dataclasses.field(default=256, kw_only=True)
    seed: int | None = dataclasses.field(default=None, kw_only=True)
    top_p: float | None = dataclasses.field(default=None, kw_only=True)
    log_probs: bool = dataclasses.field(default=False, kw_only=True)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        if taken := [name for name in _OWN_FIELDS if name in self.extra]:
            raise ValueError(f"a request's extra may not hold {', '.join(taken)}.")

    @property
    def greedy(self) -> bool:
        """Whether the same request has the same answer."""
        return self.extra.get("temperature", self.temperature) == 0

    def _body(self, model: str) -> dict[str, Any]:
        body = {"model": model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        if self.seed is not None:
            body["seed"] = self.seed
        if self.top_p is not None:
            body["top_p"] = self.top_p
        return body


@dataclasses.dataclass(frozen=True)
class ChatRequest(Sampling):
    """A conversation to go on with: messages are (role, content) pairs."""

    messages: tuple[tuple[str, str], ...]

    path = "/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The request as the server takes it."""
        body = self._body(model)
        body["messages"] = [{"role": role, "content": content} for role, content in self.messages]
        if self.log_probs:
            body["logprobs"] = True
        return body | dict(self.extra)


@dataclasses.dataclass(frozen=True)
class CompletionRequest(Sampling):
    """A text, or its token ids, to go on with."""

    prompt: str | tuple[int, ...]

    path = "/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The request as the server takes it."""
        body = self._body(model)
        body["prompt"] = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        if self.log_probs:
            body["logprobs"] = 1
        return body | dict(self.extra)


Request = ChatRequest | CompletionRequest


def request_key(request: Request, model: str, version: str) -> bytes:
    """SHA-256 of model, version, prompt and parameters: requests of one key have one answer.

    Raises:
        TypeError: `request.extra` holds something that JSON does not.
    """
    fields = [request.path, version, request.body(model)]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()

"""Samples tokens on a vLLM server: ids are sent, ids and their log-probabilities come back.

The server must give the log-probabilities of the distribution that was drawn from, and know the
published versions by their model names: start it with `config.llm.server.publish`. Tokens are never
read from text. Whatever a model's generation_config.json says of sampling is overruled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Answer, CompletionRequest, Failure, Outcome, Request
from qrag_jax.rollouts.token_sampler import (
    LENGTH,
    STOP,
    Sampled,
    SampleRequest,
    SamplingConfig,
    rooms,
)

Submit = Callable[[Sequence[Request]], Future[list[Outcome]]]

# With these values no field changes the distribution; with others training is refused.
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_RESHAPING = (
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "use_beam_search"),
    *("structured_outputs", "response_format", "thinking_token_budget"),
)
# vLLM writes this in the place of minus infinity.
_LEAST = -9999.0
_MODE = "start vLLM with --logprobs-mode processed_logprobs (config.llm.server.publish=True does)"


class ServerSampler:
    """See `rollouts.token_sampler`; requests are answered one by one, in any order.

    Args:
        submit: `Client.submit`; the client asks again where a failure may pass.
        config: the sampling.
        stop_ids: tokens that end a turn. The model's own end of text does so only if it is one.
        extra: further fields of the requests, such as `{"priority": 1}`.
    """

    def __init__(
        self,
        submit: Submit,
        config: SamplingConfig,
        stop_ids: Sequence[int],
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._submit, self._stop_ids = submit, tuple(stop_ids)
        own = {
            "return_token_ids": True,
            "stop_token_ids": list(self._stop_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        for name, value in (extra or {}).items():
            if name in _RESHAPING or value != _NEUTRAL.get(name, value):
                raise InputError(
                    f"{name}={value!r} changes the distribution that tokens are drawn from, so the "
                    "policy's own log-probabilities would be others; train without it."
                )
            if name in own:
                raise InputError(f"{name} is set by the sampler; leave it out of the requests.")
        self._extra = {**(extra or {}), **_NEUTRAL, **own}

    def sample(
        self, model: str, requests: Sequence[SampleRequest]
    ) -> list[Future[Sampled | Failure]]:
        """Starts to draw the turns; one future for each request, in their order.

        Cancelling a future takes its request back.

        Args:
            model: the name of one version, as `Publisher` published it.
            requests: the turns.

        Raises:
            ValueError: a context is empty, or has no room for a token behind it.
        """
        return [
            self._one(self._request(model, request, most), most)
            for request, most in zip(requests, rooms(requests, self.config.room), strict=True)
        ]

    def _request(self, model: str, request: SampleRequest, most: int) -> CompletionRequest:
        return CompletionRequest(
            tuple(request.ids.tolist()),
            model=model,
            temperature=self.config.temperature,
            max_tokens=most,
            seed=seed_of(request),
            log_probs=True,
            extra=self._extra,
        )

    def _one(self, request: CompletionRequest, most: int) -> Future[Sampled | Failure]:
        asked = self._submit([request])
        turn: Future[Sampled | Failure] = Future()

        def answered(asked: Future[list[Outcome]]) -> None:
            if asked.cancelled():
                turn.cancel()
            if not turn.set_running_or_notify_cancel():
                return
            try:
                (outcome,) = asked.result()
                turn.set_result(
                    read_turn(outcome, most, self._stop_ids)
                    if isinstance(outcome, Answer)
                    else outcome
                )
            except BaseException as error:  # a mistake in the program: whoever waits must see it
                turn.set_exception(error)

        turn.add_done_callback(lambda turn: turn.cancelled() and asked.cancel())
        asked.add_done_callback(answered)
        return turn


def seed_of(request: SampleRequest) -> int:
    """The seed of a turn's draws, 0 to 2^63 - 1: by the segment's key and the first new position.

    vLLM draws a request's tokens from a generator of its own, so a turn's draws do not depend on
    the other requests.
    """
    words = np.array([*request.key, len(request.ids)], "<u4")
    digest = hashlib.sha256(words.tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def read_turn(answer: Answer, most: int, stop_ids: Sequence[int]) -> Sampled | Failure:
    """The turn in an answer, or a failure if it is not as asked.

    Args:
        answer: to a request for token ids and log-probabilities.
        most: how many tokens were asked for.
        stop_ids: tokens that end a turn.
    """
    ids, log_probs = answer.token_ids, answer.log_probs
    if problem := _problem(answer, most, stop_ids):
        return Failure("malformed", problem)
    stopped = ids[-1] in stop_ids
    if not stopped and len(ids) < most:
        return Failure(
            "too_long",
            f"the server cut the turn off after {len(ids)} of {most} tokens; raise "
            "config.llm.server.max_model_len to config.sampling.room, or shorten the room",
        )
    finish = STOP if stopped else LENGTH
    return Sampled(np.array(ids, np.int32), np.array(log_probs, np.float32), finish)


def _problem(answer: Answer, most: int, stop_ids: Sequence[int]) -> str:
    """Why an answer is no turn, as one sentence; "" if it is one."""
    ids, log_probs = answer.token_ids, answer.log_probs
    if not ids:
        return (
            "the server gave no token ids; start vLLM 0.10.2 or newer, which gives them where "
            "return_token_ids asks for them"
        )
    if len(log_probs) != len(ids):
        return f"the server gave {len(log_probs)} log-probabilities of {len(ids)} tokens; {_MODE}"
    if not all(_LEAST < value <= 1e-3 for value in log_probs):  # nor NaN
        return f"the server gave values that are no log-probabilities of drawn tokens; {_MODE}"
    if not all(0 <= number < 2**31 for number in ids) or len(ids) > most:
        return f"the server gave {len(ids)} tokens, {most} were asked for; use vLLM"
    if any(number in stop_ids for number in ids[:-1]):
        return "the server went on behind a stop id; use one that follows stop_token_ids, as vLLM"
    if answer.finish_reason == STOP and ids[-1] not in stop_ids:
        return (
            f"the server ended the turn with token {ids[-1]}, which is none of the stop ids "
            f"{', '.join(map(str, stop_ids)) or '(there are none)'}; use one that follows "
            "ignore_eos and stop_token_ids, as vLLM"
        )
    return ""

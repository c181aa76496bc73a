"""Samples tokens on a vLLM server: ids are sent, ids and their log-probabilities come back.

The server must give the log-probabilities of the distribution that was drawn from, and know the
published versions by their model names: start it with `config.llm.server.publish`. Tokens are never
read from text. Whatever a model's generation_config.json says of sampling is overruled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Answer, CompletionRequest, Failure, Outcome, Request
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.trunks.qwen3 import LanguageModel
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.policies.tokens import Vocabulary, token_scores
from qrag_jax.rollouts.trajectories import (
    LENGTH,
    STOP,
    Sampled,
    SampleRequest,
    SamplingConfig,
    rooms,
)

Submit = Callable[[Sequence[Request]], Future[list[Outcome]]]

# With these values no field changes the distribution. vLLM takes those of the model's
# generation_config.json otherwise.
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# vLLM writes this in the place of minus infinity.
_LEAST = -9999.0
_MODE = "start vLLM with --logprobs-mode processed_logprobs (config.llm.server.publish=True does)"


class ServerSampler:
    """See `rollouts.trajectories`; requests are answered one by one, in any order.

    Args:
        submit: of a `Client`, which asks again where a failure may pass.
        stop_ids: tokens that end a turn. The model's own end of text does so only if it is one.
    """

    def __init__(self, submit: Submit, config: SamplingConfig, stop_ids: Sequence[int]) -> None:
        self.config = config
        self._submit, self._stop_ids = submit, tuple(stop_ids)
        self._extra = {
            **_NEUTRAL,
            "return_token_ids": True,
            "stop_token_ids": list(self._stop_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
        }

    def sample(
        self, model: str, requests: Sequence[SampleRequest]
    ) -> list[Future[Sampled | Failure]]:
        """Starts to draw the turns; one future for each request, in their order.

        Cancelling a future takes its request back.

        Args:
            model: the name of one version, as `Publisher` published it.
        """
        return [
            self._one(
                CompletionRequest(
                    tuple(request.ids.tolist()),
                    model=model,
                    temperature=self.config.temperature,
                    max_tokens=most,
                    seed=seed_of(request),
                    log_probs=True,
                    extra=self._extra,
                ),
                most,
            )
            for request, most in zip(requests, rooms(requests, self.config.room), strict=True)
        ]

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
                if isinstance(outcome, Answer):
                    turn.set_result(read_turn(outcome, most, self._stop_ids))
                else:
                    turn.set_result(outcome)
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
    """The turn in an answer, or a failure if it is not as asked."""
    ids, log_probs, problem = answer.token_ids, answer.log_probs, ""
    if not ids:
        problem = (
            "the server gave no token ids; start vLLM 0.10.2 or newer, which gives them where "
            "return_token_ids asks for them"
        )
    elif len(log_probs) != len(ids):
        problem = f"{len(log_probs)} log-probabilities of {len(ids)} tokens came; {_MODE}"
    elif not all(_LEAST < value <= 1e-3 for value in log_probs):  # nor NaN
        problem = f"the server gave values that are no log-probabilities of drawn tokens; {_MODE}"
    elif not all(0 <= number < 2**31 for number in ids) or len(ids) > most:
        problem = f"the server gave {len(ids)} tokens, {most} were asked for; use vLLM"
    elif any(number in stop_ids for number in ids[:-1]):
        problem = (
            "the server went on behind a stop id; use one that follows stop_token_ids, as vLLM"
        )
    elif answer.finish_reason == STOP and ids[-1] not in stop_ids:
        problem = (
            f"the server ended the turn with token {ids[-1]}, which is none of the stop ids "
            f"{', '.join(map(str, stop_ids)) or '(there are none)'}; use one that follows "
            "ignore_eos and stop_token_ids, as vLLM"
        )
    if problem:
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


# ---------------------------------------------------------------- is it the trainer's model?

TOLERANCE = 0.1  # nats a token; bfloat16 on both sides makes some hundredths
_ROUNDING = 1e-3  # nats a token; below it, nothing tells two temperatures apart


def check_log_probs(
    server: np.ndarray,
    trainer: np.ndarray,
    trainer_at_one: np.ndarray,
    plain: np.ndarray | None = None,
    *,
    temperature: float,
) -> float:
    """Compares log-probabilities of the same sampled tokens, in nats; use it on a first batch.

    vLLM gives raw log-probabilities, those at temperature 1, unless it was told otherwise. Where
    the policy is sure of most tokens, both kinds lie within the tolerance; so the server's are also
    taken for raw if they are less than half as far from the trainer's at temperature 1. In the same
    way a server is known that leaves out the adapters that were handed over to it.

    Args:
        server: `[S]`, as the server gave them.
        trainer: `[S]`, of the trainer at the temperature of sampling, by the same weights.
        trainer_at_one: `[S]`, of the trainer at temperature 1.
        plain: `[S]`, of the trainer without adapters; None: all weights are trained.

    Returns:
        The mean distance of `server` and `trainer`.
    """
    distance, at_one = _distance(server, trainer), _distance(server, trainer_at_one)
    without = math.inf if plain is None else _distance(server, plain)
    if without < distance / 2 and distance > _ROUNDING:
        raise InputError(
            f"the server answers without the adapters that were handed over: it is {distance:.3g} "
            f"nats a token from the trainer with them, and {without:.3g} from the trainer without; "
            "use a vLLM that has LoRA for this model, or set config.sampling.engine to device."
        )
    if at_one < distance / 2 and distance > _ROUNDING and at_one <= TOLERANCE:
        raise InputError(
            f"the server gives raw log-probabilities: they are {distance:.3g} nats a token from "
            f"the trainer's at the temperature {temperature:g}, and {at_one:.3g} at 1; {_MODE}."
        )
    if not distance <= TOLERANCE:  # nor NaN
        raise InputError(
            f"the server's log-probabilities are {distance:.3g} nats a token from the trainer's, "
            f"more than {TOLERANCE:g}; serve the model's folder that is trained, with its "
            "tokenizer, and sample by the version that was published last."
        )
    return distance


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).mean())


# ---------------------------------------------------------------- the trainer's log-probabilities

_WIDTHS = 64  # rows are as long as a multiple of this: attention on GPUs wants even lengths


def turn_log_probs(
    model: LanguageModel,
    params: Params | Adapted,
    turns: Sequence[tuple[np.ndarray, np.ndarray]],
    temperatures: Sequence[float],
) -> list[np.ndarray]:
    """Log-probabilities of sampled tokens, in nats; float32 `[S]` for each temperature.

    Args:
        params: of the model, stacked; or a base and adapters.
        turns: the ids before a turn, one at least, and those that were sampled.
        temperatures: that logits are divided by; 0 is taken for 1, as samplers do.

    Returns:
        The tokens of all turns, one turn behind the other.
    """
    longest = max(len(before) + len(sampled) for before, sampled in turns)
    width = -(-longest // _WIDTHS) * _WIDTHS
    most = max(len(sampled) for _, sampled in turns)
    tokens = np.zeros((len(turns), width), np.int32)
    lengths = np.zeros(len(turns), np.int32)
    place, target = (np.zeros((len(turns), most), np.int32) for _ in range(2))
    for row, (before, sampled) in enumerate(turns):
        lengths[row] = len(before) + len(sampled)
        tokens[row, : lengths[row]] = np.concatenate([before, sampled])
        place[row, : len(sampled)] = np.arange(len(before) - 1, lengths[row] - 1)
        target[row, : len(sampled)] = sampled
    is_sampled = np.arange(most)[None] < np.array([len(sampled) for _, sampled in turns])[:, None]
    scored = jax.jit(partial(_scored, model, tuple(each or 1.0 for each in temperatures)))
    found = jax.device_get(scored(params, tokens, lengths, place, target))
    return [np.asarray(each)[is_sampled] for each in found]


def _scored(
    model: LanguageModel,
    temperatures: Sequence[float],
    params: Params | Adapted,
    *rows: jax.Array,
) -> list[jax.Array]:
    """`[B, S]` for each temperature.

    Args:
        rows: tokens `[B, L]`, lengths `[B]`; places before sampled tokens and these `[B, S]`.
    """
    tokens, lengths, place, target = rows
    whole = attach(params, model.lora_scale)
    hidden = model.trunk.hidden_states(whole, tokens, lengths)
    before = jnp.take_along_axis(hidden, place[..., None], axis=1)
    before = before.reshape(-1, before.shape[-1])
    found = []
    for temperature in temperatures:
        how = Vocabulary(temperature, products=model.trunk.precision.products)
        scores = token_scores(how, before, model.head(whole), target.reshape(-1))
        found.append(scores.log_probs.reshape(target.shape))
    return found

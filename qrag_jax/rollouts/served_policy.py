"""A policy whose turns a vLLM server samples: each version is handed over before it plays.

An adapter is loaded under a name of its own, so an episode is sampled by one version whatever comes
meanwhile. All weights are exchanged between two batches, on a server of our own alone. Such a
server, if it is restarted, is asked for nothing until it has the weights again.

Ids are sent, and ids and their log-probabilities come back; tokens are never read from text. The
server must give the log-probabilities of the distribution that was drawn from, and know the
published versions by their model names: start it with `config.llm.server.publish`. Whatever a
model's generation_config.json says of sampling is overruled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.errors import InputError
from qrag_jax.feedback.llm import metrics_of_all
from qrag_jax.feedback.rewards import FIRST_PAUSE, LONGEST_PAUSE, Checks, Watch, pause
from qrag_jax.llm.config import ServedConfig
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.outcomes import Answer, CompletionRequest, Failure, Outcome, Request
from qrag_jax.llm.server.publish import Publisher, PublishError, Weights
from qrag_jax.llm.server.server import Existing, Server, open_server
from qrag_jax.models.compute.lora import LORA_B, Adapted, attach, merge
from qrag_jax.models.embedding import LanguageModel
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained import LoadedLanguageModel, LoraConfig, write_adapters
from qrag_jax.models.trunks.transformer import Params
from qrag_jax.rollouts import trajectories
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.runtime.interrupt import StopSignal, wait_for
from qrag_jax.runtime.run import log

if TYPE_CHECKING:  # runs without a server do not need it
    from qrag_jax.llm.client import Client

_CHECKED_TOKENS = 32  # of each turn
_NOISE = 0.3  # of the adapters that the check hands over, next to outputs of the order of 1
_REFUSED = range(400, 500)


Submit = Callable[[Sequence[Request]], Future[list[Outcome]]]

# vLLM writes this in the place of minus infinity.
_LEAST = -9999.0
_MODE = "start vLLM with --logprobs-mode processed_logprobs (config.llm.server.publish=True does)"


@dataclasses.dataclass
class ServerSampler:
    """Samples by one version on the server; see `trajectories.Sampler`.

    Requests are answered in any order. Cancelling a future takes its request back.
    """

    ask: Submit  # of a `Client`, which asks again where a failure may pass
    config: trajectories.SamplingConfig
    stop_ids: Sequence[int]  # that end a turn; the model's own end of text only if it is one
    model: str  # its name on the server, as `Publisher` published it
    version: str = ""
    in_rounds = False

    def submit(self, requests: Sequence[trajectories.SampleRequest]) -> list[Future[list[Outcome]]]:
        # vLLM takes neutral values from the model's generation_config.json unless they are given.
        extra = trajectories.NEUTRAL | {
            "return_token_ids": True,
            "ignore_eos": True,
            "stop_token_ids": [*self.stop_ids],
            "skip_special_tokens": False,
        }

        def completion(request: trajectories.SampleRequest) -> CompletionRequest:
            return CompletionRequest(
                tuple(request.ids.tolist()),
                model=self.model,
                temperature=self.config.temperature,
                max_tokens=self._most(request),
                seed=seed_of(request),
                log_probs=True,
                extra=extra,
            )

        return [self.ask([completion(request)]) for request in requests]

    def read(
        self, request: trajectories.SampleRequest, result: list[Outcome]
    ) -> trajectories.Sampled | Failure:
        (outcome,) = result
        if isinstance(outcome, Failure):
            return outcome
        return read_turn(outcome, self._most(request), self.stop_ids)

    def _most(self, request: trajectories.SampleRequest) -> int:
        return min(request.most, self.config.room - len(request.ids))


class ServedPolicy:
    """The server, and what it serves. One thread at a time hands over and plays."""

    def __init__(
        self,
        model: LoadedLanguageModel,
        speech: Speech,
        workdir: Path,
        *,
        llm: ServedConfig,
        sampling: trajectories.SamplingConfig,
        lora: LoraConfig | None,
        staleness: int,
    ) -> None:
        """`lora`: sizes of the adapters; None: all weights are trained."""
        products = model.model.trunk.precision.products
        self._llm = llm.serving(str(model.folder.absolute()), np.dtype(products).name)
        self._model, self._speech = model, speech
        self._sampling, self._lora, self._staleness = sampling, lora, staleness
        self._workdir, self._closing = workdir, contextlib.ExitStack()
        self._seconds: list[float] = []  # of each hand-over, until the server's answer
        # Both are there when the server answers.
        self._publisher: Publisher | None = None
        self._client: Client | None = None
        # A server that runs for longer than this process must not see a name twice.
        self._own, self._tries = secrets.token_hex(3), 0

    @contextlib.contextmanager
    def open(self) -> Iterator[ServedPolicy]:
        """Starts the server, while the caller goes on; it ends with the block."""

        def published(do: Callable[[Publisher], object]) -> None:
            if self._publisher is not None:
                do(self._publisher)

        opened = open_server(
            self._llm,
            self._workdir,
            jax.process_index(),
            log=log,
            on_down=partial(published, Publisher.forget),
            on_up=partial(published, Publisher.republish),
        )
        with opened as self._server, self._closing:
            yield self

    def wait(self, stop: StopSignal) -> None:
        if self._client is not None:
            return
        from qrag_jax.llm.client import Client

        server = self._server
        server.wait(stop.check)
        config = self._llm.client(server.url, server.name)
        self._publisher = publisher = self._closing.enter_context(
            Publisher(server.url, server.name, config.api_key(), keep=self._staleness + 2)
        )
        # Our server, if it was restarted, is down until it has the weights again.
        is_ours = isinstance(server, Server)
        self._client = Client(config, log, lambda: not is_ours or bool(publisher.current.version))
        self._closing.callback(self._client.close)
        self._endpoint = Endpoint(server.url, config.api_key())

    def watch(self, stop: StopSignal) -> Checks:
        return Watch(stop, lambda: self._server.failure)

    def counts(self) -> dict[str, float]:
        """Of the clients and of the hand-overs, as metrics; all hosts call this together.

        Seconds of hand-overs are a median, those of this host.
        """
        counters = metrics_of_all(self._client.counters()) if self._client is not None else {}
        if self._seconds:
            counters["llm/handover_seconds"] = float(np.median(self._seconds))
        return counters

    # ---------------------------------------------------------------- versions

    def sampler(self, weights: trajectories.Versioned, stop: StopSignal) -> ServerSampler:
        """Samples by these weights; hands them over if they are not the ones served last."""
        return self._published(weights.params, str(weights.updates), self.watch(stop))

    def bring_back(self, version: ServerSampler, stop: StopSignal) -> None:
        """Hands a version over again to a running server that was restarted by somebody else."""
        watch = self.watch(stop)
        while isinstance(self._server, Existing):
            names = self._endpoint.model_names()
            # A server that does not answer is waited for by the client.
            if not names or version.model in names:
                return
            log(f"{self._server.url} has lost {version.model}; it is handed over again.")
            assert self._publisher is not None
            try:
                self._publisher.republish()
            except PublishError as error:
                log(str(error))
            pause(FIRST_PAUSE, watch)

    def _published(self, params: Params, version: str, watch: Checks) -> ServerSampler:
        """Hands weights over, unless they are served already; waits while the server is down."""
        publisher, seconds = self._publisher, FIRST_PAUSE
        assert publisher is not None
        assert self._client is not None
        named = f"{version}.{self._own}."
        table, sizes = self._model.table, self._lora
        while not (current := publisher.current).version.startswith(named):
            watch.check()
            self._tries += 1
            began, arrays = time.monotonic(), jax.device_get(params)
            source: Weights
            if sizes is None:
                source = tensors_from_params(table, arrays)
            else:
                source = partial(write_adapters, table=table, config=sizes, adapters=arrays)
            try:
                publisher.publish(source, f"{named}{self._tries}")
            except PublishError as error:
                if error.status in _REFUSED:
                    raise InputError(f"the server does not take the weights: {error}") from None
                log(f"{error} It is tried again in {seconds:.0f} s.")
                pause(seconds, watch)
                seconds = min(2 * seconds, LONGEST_PAUSE)
            else:
                self._seconds.append(time.monotonic() - began)
        stop_ids = self._speech.scaffold.stop_ids
        return ServerSampler(self._client.submit, self._sampling, stop_ids, *current)

    # ---------------------------------------------------------------- the check

    def check(
        self, params: Params, base: Params | None, prompts: Sequence[np.ndarray], stop: StopSignal
    ) -> float:
        """Samples a little and compares with the trainer, before anything is learned.

        Adapters that are new change nothing yet; so adapters with random numbers are handed over.
        Returns the mean distance, in nats a token.
        """
        watch, temperature = self.watch(stop), self._sampling.temperature
        sizes, model = self._lora, self._model.model
        played = params if sizes is None else _noisy(params, sizes)
        sampler = self._published(played, "check", watch)
        most = min(_CHECKED_TOKENS, self._speech.turn)
        requests = [
            trajectories.SampleRequest(ids, np.array([number, most], np.uint32), most)
            for number, ids in enumerate(prompts)
        ]
        turns = list[trajectories.Sampled]()
        for request, future in zip(requests, sampler.submit(requests), strict=True):
            turn = sampler.read(request, wait_for(future, watch.check))
            if isinstance(turn, Failure):
                why = turn.message.rstrip(".")
                raise InputError(f"the server cannot sample for training: {why}.")
            turns.append(turn)
        server = np.concatenate([turn.log_probs for turn in turns])
        drawn = [(ids, turn.ids) for ids, turn in zip(prompts, turns, strict=False)]
        trainer, at_one = turn_log_probs(model, merge(played, base), drawn, (temperature, 1.0))
        others = {"at temperature 1": at_one}
        if base is not None:
            (bare,) = turn_log_probs(model, base, drawn, (temperature,))
            others["without the adapters"] = bare
        return check_log_probs(server, trainer, others)


def _noisy(adapters: Params, sizes: LoraConfig) -> Any:
    """Adapters whose products are random, and nearly as large as outputs of linear maps."""
    draw = np.random.default_rng(0)
    size = _NOISE / (sizes.scale * np.sqrt(sizes.rank))
    leaves = {
        path: draw.normal(0, size, leaf.shape).astype(np.float32) if path[-1] == LORA_B else leaf
        for path, leaf in flatten_dict(jax.device_get(adapters)).items()
    }
    return unflatten_dict(leaves)


# ---------------------------------------------------------------- a turn of the server


def seed_of(request: trajectories.SampleRequest) -> int:
    """The seed of a turn's draws, 0 to 2^63 - 1: by the segment's key and the first new position.

    vLLM draws a request's tokens from a generator of its own.
    """
    words = np.array([*request.key, len(request.ids)], "<u4")
    digest = hashlib.sha256(words.tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def read_turn(answer: Answer, most: int, stop_ids: Sequence[int]) -> trajectories.Sampled | Failure:
    """The turn in an answer, or a failure if it is not as asked."""
    ids, log_probs, problem = answer.token_ids, answer.log_probs, ""
    if not ids:
        problem = (
            "the server gave no token ids; start vLLM 0.10.2 or newer, which gives them where "
            "return_token_ids asks for them"
        )
    # Also NaN is no log-probability.
    elif len(log_probs) != len(ids) or not all(_LEAST < value <= 1e-3 for value in log_probs):
        problem = f"the server gave no log-probabilities of {len(ids)} drawn tokens; {_MODE}"
    elif not all(0 <= number < 2**31 for number in ids) or len(ids) > most:
        problem = f"the server gave {len(ids)} tokens, {most} were asked for; use vLLM"
    elif any(number in stop_ids for number in ids[:-1]) or (
        answer.finish_reason == trajectories.STOP and ids[-1] not in stop_ids
    ):
        problem = (
            f"the server did not end the turn at a stop id ({', '.join(map(str, stop_ids))}); use "
            "one that follows ignore_eos and stop_token_ids, as vLLM"
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
    finish = trajectories.STOP if stopped else trajectories.LENGTH
    return trajectories.Sampled(np.array(ids, np.int32), np.array(log_probs, np.float32), finish)


# ---------------------------------------------------------------- is it the trainer's model?

TOLERANCE = 0.1  # nats a token; bfloat16 on both sides makes some hundredths
_ROUNDING = 1e-3  # nats a token; below it, nothing tells two temperatures apart


def check_log_probs(
    server: np.ndarray, trainer: np.ndarray, others: Mapping[str, np.ndarray]
) -> float:
    """The mean distance between log-probabilities `[S]` of the same sampled tokens, in nats.

    vLLM gives raw log-probabilities, those at temperature 1, unless it was set otherwise, and some
    servers leave out adapters. Where the policy is sure of most tokens, these lie within the
    tolerance, too; so the server's must not be less than half as far from one of the `others`,
    which are of the trainer in such ways.
    """
    distance = _distance(server, trainer)
    wrong = {name: _distance(server, values) for name, values in others.items()}
    is_other = distance > _ROUNDING and min(wrong.values()) < distance / 2
    if is_other or not distance <= TOLERANCE:  # nor NaN
        distances = ", ".join(f"{apart:.3g} from those {name}" for name, apart in wrong.items())
        raise InputError(
            f"the server's log-probabilities are {distance:.3g} nats a token from the trainer's "
            f"({distances}); serve the folder of the model that is trained by a vLLM that has LoRA "
            f"for it, and {_MODE}, or set config.sampling.engine to device."
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

    A turn is the ids before it, one at least, and those that were sampled; the tokens of all turns
    are one behind the other. Temperature 0 is taken for 1, as samplers do.
    """
    rows = [np.concatenate(turn) for turn in turns]
    width = -(-max(map(len, rows)) // _WIDTHS) * _WIDTHS
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows], np.int32)
    # Of each sampled token: itself, its row, and the place of the hidden state before it.
    target = np.concatenate([sampled for _, sampled in turns])
    row_of = np.repeat(np.arange(len(rows)), [len(sampled) for _, sampled in turns])
    befores = [np.arange(len(before), len(before) + len(sampled)) - 1 for before, sampled in turns]
    place = np.concatenate(befores)

    @jax.jit
    def scored(params: Params | Adapted, tokens: jax.Array, lengths: jax.Array) -> list[jax.Array]:
        whole = attach(params, model.lora_scale)
        hidden = model.trunk.hidden_states(whole, tokens, lengths)[row_of, place]
        logits = model.logits_of(hidden, model.head(whole))
        every = (jax.nn.log_softmax(logits / (temperature or 1.0)) for temperature in temperatures)
        return [log_probs[np.arange(len(target)), target] for log_probs in every]

    return [np.asarray(values) for values in scored(params, tokens, lengths)]

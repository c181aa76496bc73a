"""A policy whose turns a vLLM server samples: each version is handed over before it plays.

An adapter is loaded under a name of its own, so an episode is sampled by one version whatever comes
meanwhile. All weights are exchanged between two batches, on a server of our own alone. Such a
server, if it is restarted, is asked for nothing until it has the weights again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.errors import InputError
from qrag_jax.feedback.llm import FIRST_PAUSE, LONGEST_PAUSE, Checks, Watch, metrics_of_all, pause
from qrag_jax.llm.config import ServedConfig
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.server.opening import LOOK_EVERY, Existing, Place, server_of, started
from qrag_jax.llm.server.publish import Published, Publisher, PublishError
from qrag_jax.llm.server.server import Server
from qrag_jax.models.adapters import LoraConfig, write_adapters
from qrag_jax.models.compute.linear import LORA_B
from qrag_jax.models.compute.lora import merge
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, table_of
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.server_sampler import ServerSampler, check_log_probs, turn_log_probs
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.rollouts.trajectories import Sampled, SampleRequest, SamplingConfig
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.runtime.whole_files import MEMORY, weights_folder

if TYPE_CHECKING:  # runs without a server do not need it
    from qrag_jax.llm.client import Client

_CHECKED_TURNS, _CHECKED_TOKENS = 8, 32
_NOISE = 0.3  # of the adapters that the check hands over, beside outputs of the order of 1
_REFUSED = range(400, 500)


class Versioned(NamedTuple):
    """Weights that play."""

    params: Params  # what is trained: adapters, or all weights
    updates: int  # how many updates made them; it is their version


@dataclasses.dataclass
class VersionSampler:
    """Samples by one version on the server; see `trajectories.Sampler`."""

    sampler: ServerSampler
    model: str  # its name on the server
    version: str
    in_rounds: bool = False

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled | Failure]]:
        return self.sampler.sample(self.model, requests)


class ServedSettings(NamedTuple):
    """How a policy is served."""

    llm: ServedConfig
    sampling: SamplingConfig  # of turns
    lora: LoraConfig | None  # sizes of the adapters; None: all weights are trained
    staleness: int  # K; K + 2 versions stay loaded


class ServedPolicy:
    """The server, and what it serves. One thread at a time hands over and plays."""

    def __init__(
        self, settings: ServedSettings, model: LoadedLanguageModel, speech: Speech, workdir: Path
    ) -> None:
        products = model.model.trunk.precision.products
        llm = settings.llm.serving(str(model.folder.absolute()), np.dtype(products).name)
        self._settings, self._model, self._speech = settings._replace(llm=llm), model, speech
        here = Place(workdir, workdir, jax.process_index())
        self._closing = contextlib.ExitStack()
        self._seconds: list[float] = []  # of each hand-over, until the server's answer
        # All are there when the server answers.
        self._publisher: Publisher | None = None

        def forget() -> None:
            if self._publisher is not None:
                self._publisher.forget()

        def republish() -> None:
            if self._publisher is not None:
                self._publisher.republish()

        self._server: Server | Existing = server_of(
            llm, here, log=log, on_down=forget, on_up=republish
        )
        self._client: Client | None = None
        # A server that runs for longer than this process must not see a name twice.
        self._own, self._tries = secrets.token_hex(3), 0

    @contextlib.contextmanager
    def open(self) -> Iterator[ServedPolicy]:
        """Starts the server, while the caller goes on; it ends with the block."""
        with started(self._server) as self._wait, self._closing:
            yield self

    def wait(self, stop: StopSignal) -> None:
        """Waits until the server answers."""
        if self._client is not None:
            return
        from qrag_jax.llm.client import Client

        self._wait(stop)
        settings, server = self._settings, self._server
        config = settings.llm.client(server.url, server.name)
        self._publisher = publisher = self._closing.enter_context(
            Publisher(server.url, server.name, config.api_key(), keep=settings.staleness + 2)
        )
        in_memory = MEMORY if os.access(MEMORY, os.W_OK) else None
        self._folder = self._closing.enter_context(weights_folder(in_memory))
        # Our server, if it was restarted, is down until it has the weights again.
        is_ours = isinstance(server, Server)
        self._client = Client(config, log, lambda: not is_ours or bool(publisher.current.version))
        self._closing.callback(self._client.close)
        stop_ids = self._speech.scaffold.stop_ids
        self._sampler = ServerSampler(self._client.submit, settings.sampling, stop_ids)
        self._endpoint = Endpoint(server.url, config.api_key())

    def watch(self, stop: StopSignal) -> Checks:
        """Looks at the signal, and whether the server was given up."""
        return Watch(stop, lambda: self._server.failure)

    def counts(self) -> dict[str, float]:
        """Of the clients and of the hand-overs, as metrics; all hosts call this together.

        Seconds of hand-overs are a median, those of this host.
        """
        found = metrics_of_all(self._client.counters()) if self._client is not None else {}
        if self._seconds:
            found["llm/handover_seconds"] = float(np.median(self._seconds))
        return found

    # ---------------------------------------------------------------- versions

    def sampler(self, weights: Versioned, stop: StopSignal) -> VersionSampler:
        """Samples by these weights; hands them over if they are not the ones served last."""
        published = self._publish(weights.params, str(weights.updates), self.watch(stop))
        return VersionSampler(self._sampler, *published)

    def bring_back(self, version: VersionSampler, stop: StopSignal) -> None:
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

    def _publish(self, params: Params, version: str, watch: Checks) -> Published:
        """Hands weights over, unless they are served already; waits while the server is down."""
        publisher, seconds = self._publisher, FIRST_PAUSE
        assert publisher is not None
        named = f"{version}.{self._own}."
        if publisher.current.version.startswith(named):
            return publisher.current
        while True:
            watch.check()
            self._tries += 1
            began = time.monotonic()
            try:
                published = self._handed(publisher, params, f"{named}{self._tries}")
            except PublishError as error:
                if error.status in _REFUSED:
                    raise InputError(f"the server does not take the weights: {error}") from None
                log(f"{error} It is tried again in {seconds:.0f} s.")
                pause(seconds, watch)
                seconds = min(2 * seconds, LONGEST_PAUSE)
            else:
                self._seconds.append(time.monotonic() - began)
                return published

    def _handed(self, publisher: Publisher, params: Params, version: str) -> Published:
        table = table_of(self._model.model_config["model_type"])
        arrays, sizes = jax.device_get(params), self._settings.lora
        if sizes is None:
            return publisher.publish(tensors_from_params(table, arrays), version)
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            write_adapters(Path(name), table, sizes, arrays)
            return publisher.publish(Path(name), version)

    # ---------------------------------------------------------------- the check

    def check(
        self, params: Params, base: Params | None, prompts: Sequence[np.ndarray], stop: StopSignal
    ) -> float:
        """Samples a little and compares with the trainer, before anything is learned.

        Adapters that are new change nothing yet; so adapters with random numbers are handed over.

        Args:
            params: what is trained, as at first, on the devices.
            base: of adapters; None: all weights are trained.
            prompts: int32, one at least.

        Returns:
            The mean distance, in nats a token.
        """
        self._check_tokenizer(prompts[0])
        watch, temperature = self.watch(stop), self._settings.sampling.temperature
        sizes, model = self._settings.lora, self._model.model
        played = params if sizes is None else _noisy(params, sizes)
        published = self._publish(played, "check", watch)
        most = min(_CHECKED_TOKENS, self._speech.turn)
        requests = [
            SampleRequest(ids, np.array([number, most], np.uint32), most)
            for number, ids in enumerate(prompts[:_CHECKED_TURNS])
        ]
        turns = list[Sampled]()
        for future in self._sampler.sample(published.model, requests):
            while not wait([future], LOOK_EVERY / 10).done:
                watch.check()
            found = future.result()
            if isinstance(found, Failure):
                why = found.message.rstrip(".")
                raise InputError(f"the server cannot sample for training: {why}.")
            turns.append(found)
        server = np.concatenate([turn.log_probs for turn in turns])
        drawn = [(ids, turn.ids) for ids, turn in zip(prompts, turns, strict=False)]
        whole = merge(played, base)
        trainer, at_one = turn_log_probs(model, whole, drawn, (temperature, 1.0))
        bare = None if base is None else turn_log_probs(model, base, drawn, (temperature,))[0]
        return check_log_probs(server, trainer, at_one, bare, temperature=temperature or 1.0)

    def _check_tokenizer(self, ids: np.ndarray) -> None:
        """Compares how both cut the text of a prompt, if the server tells."""
        tokenizer = self._speech.tokenizer
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        body = {"model": self._server.name, "prompt": text, "add_special_tokens": False}
        reply = self._endpoint.post("/tokenize", body)
        theirs = reply.json.get("tokens") if isinstance(reply.json, dict) else None
        if reply.status != 200 or theirs is None:
            return  # the comparison of log-probabilities notices most others
        ours = tokenizer(text, add_special_tokens=False).input_ids
        if list(ours) != list(theirs):
            raise InputError(
                f"the server has another tokenizer: it cuts a prompt into {len(theirs)} tokens "
                f"that are not the {len(ours)} of {self._model.folder}; serve the folder of the "
                "model that is trained."
            )


def _noisy(adapters: Params, sizes: LoraConfig) -> Any:
    """Adapters whose products are random, and nearly as large as outputs of linear maps."""
    draw = np.random.default_rng(0)
    size = _NOISE / (sizes.scale * np.sqrt(sizes.rank))
    leaves = {
        path: draw.normal(0, size, leaf.shape).astype(np.float32) if path[-1] == LORA_B else leaf
        for path, leaf in flatten_dict(jax.device_get(adapters)).items()
    }
    return unflatten_dict(leaves)

"""Opens the language model of the section `llm`: its server, if it is ours, and its client.

Our server starts while the caller goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrag_jax.errors import InputError
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.served_config import LlmConfig
from qrag_jax.llm.server.model_digest import served_version
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.server.sidecar import Existing, sidecar
from qrag_jax.llm.text.generation import Generation
from qrag_jax.runtime.interrupt import StopSignal

if TYPE_CHECKING:  # it imports openai, which runs without a model do not need
    from qrag_jax.llm.client.client import Client

LOOK_EVERY = 0.1  # seconds between looks for a signal to stop
PREFIX = "config.llm."  # of the fields, in messages

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class OpenModel:
    """A language model that answers.

    Attributes:
        client: asks it.
        lost: returns why the server was given up; "" if it was not.
    """

    client: Client
    lost: Callable[[], str]

    @property
    def kept(self) -> str:
        """Where answers are kept, as the end of a sentence on those that cannot be read."""
        cache = self.client.config.cache
        return f"; of the replies, those that can be read are kept in {cache}" if cache else ""


@dataclasses.dataclass(frozen=True)
class PendingModel:
    """A language model whose server may still be starting.

    Attributes:
        ready: waits for the server; raises `Stopped` if the run is to stop first.
        name: that clients ask for.
        version: of its weights; "" if it is not known.
        generation: how answers are sampled and read.
    """

    ready: Callable[[StopSignal], OpenModel]
    name: str
    version: str
    generation: Generation

    @property
    def provenance(self) -> dict[str, Any]:
        """What an answer depends on besides its prompt, as JSON."""
        drawn = dataclasses.asdict(dataclasses.replace(self.generation, count=None))
        drawn = {f"{PREFIX}{name}": value for name, value in drawn.items() if name != "count"}
        return {"the model": self.name, f"{PREFIX}version": self.version, **drawn}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the files of a model's server and client are.

    Attributes:
        workdir: folder of the answers and of the server's log.
        digests: folder of the digests of models.
        host: number of this host, if there are several; hosts do not share files.
    """

    workdir: Path
    digests: Path
    host: int = 0

    def own(self, name: str) -> str:
        """A file's name on this host."""
        if not (name and self.host):
            return name
        path = Path(name)
        return str(path.with_name(f"{path.stem}-{self.host}{path.suffix}"))


@contextlib.contextmanager
def open_model(config: LlmConfig, place: Place, seed: int, log: Log) -> Iterator[PendingModel]:
    """Opens the server that `config` asks for, and its client; both end with the block.

    Args:
        seed: of sampling if the temperature is not 0 and `config.seed` is None.
        log: receives lines for people.
    """
    llm = dataclasses.asdict(config)
    client_config(llm | {"url": llm["url"] or "http://127.0.0.1:1"}, "any", None)  # checks fields
    if not llm["url"]:
        llm["server"]["log"] = place.own(llm["server"]["log"])
        if not llm["version"]:
            # Folders of the same name may hold different weights; their answers must not be mixed.
            llm["version"] = served_version(llm["server"], place.digests, log)
    server = sidecar(llm, place.workdir, _api_key(llm), log=log)
    generation = _generation(seed, llm)
    with started(server) as wait, contextlib.ExitStack() as stack:

        def ready(stop: StopSignal) -> OpenModel:
            from qrag_jax.llm.client.client import Client

            wait(stop)
            cache = place.workdir / place.own(llm["cache"]) if llm["cache"] else None
            llm["url"] = server.url
            own = server if isinstance(server, Server) else None
            client = Client(client_config(llm, server.name, cache), log, own)
            stack.callback(client.close)
            return OpenModel(client, lambda: server.failure)

        yield PendingModel(ready, server.name, llm["version"], generation)


@contextlib.contextmanager
def started(server: Server | Existing) -> Iterator[Callable[[StopSignal], None]]:
    """Starts a server while the caller goes on; it ends with the block.

    Yields:
        A function that waits until it answers; it raises `Stopped` if the run is to stop first.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="vllm-start")
    if isinstance(server, Existing):
        server.start()  # only checks it; so an error is raised at once
    starting = pool.submit(server.start)

    def wait(stop: StopSignal) -> None:
        while not concurrent.futures.wait([starting], LOOK_EVERY).done:
            stop.check()
        starting.result()

    try:
        yield wait
    finally:
        _end(server, starting, pool)


def client_config(llm: dict[str, Any], model: str, cache: Path | None) -> ClientConfig:
    """The client's settings."""
    names = ("version", "concurrency", "deadline", "attempt_timeout", "attempts", "api_key_env")
    fields = {name: llm[name] for name in names}
    return ClientConfig(llm["url"], model, cache=str(cache or ""), prefix=PREFIX, **fields)


def _end(server: Server | Existing, starting: Future[Any], pool: Any) -> None:
    starting.cancel()
    server.stop()  # a server that is starting gives up; one that has not begun does not begin
    pool.shutdown()
    server.stop()


def _api_key(llm: dict[str, Any]) -> str:
    """The key of a server that is already running; "" for our own."""
    if not llm["url"]:
        return ""
    key = llm["api_key_env"]
    return ClientConfig(llm["url"], llm["model"], api_key_env=key, prefix=PREFIX).api_key()


def _generation(seed: int, llm: dict[str, Any]) -> Generation:
    drawn = dict(llm)
    if drawn["temperature"] > 0 and drawn["seed"] is None:
        drawn["seed"] = seed
    if not llm["url"]:
        room, answer = llm["server"]["max_model_len"], drawn["max_tokens"]
        if answer >= room > 0:
            raise InputError(
                f"config.llm.max_tokens is {answer}, but the server is to hold {room} tokens of "
                "prompt and answer together (config.llm.server.max_model_len); lower the one or "
                "raise the other."
            )
        if room and not drawn["max_prompt_tokens"]:
            drawn["max_prompt_tokens"] = room - answer
        drawn["tokenizer"] = drawn["tokenizer"] or llm["server"]["model"]
        if drawn["enable_thinking"] is None:
            drawn["enable_thinking"] = False
    return Generation.of(drawn, prefix=PREFIX)

"""Opens the language model of the section `llm`: its server, if it is ours, and its client.

Our server starts while the caller goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrag_jax.errors import InputError
from qrag_jax.llm.config import PREFIX, LlmConfig, ServedConfig, interpreter
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.server.model_digest import served_version
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.text.generation import Generation
from qrag_jax.runtime.interrupt import LOOK_EVERY, StopSignal

if TYPE_CHECKING:  # it takes a while to import, and runs without a model do not need it
    from qrag_jax.llm.client import Client


Log = Callable[[str], None]


class Existing:
    """A running server that we did not start, with the interface of `Server`."""

    failure = ""

    def __init__(self, url: str, name: str, api_key: str = "") -> None:
        self.url, self.name = url, name
        self._endpoint = Endpoint(self.url, api_key)

    def start(self) -> Existing:
        """Checks that the server serves the model."""
        names = self._endpoint.model_names()
        if not names:
            reason = self._endpoint.get("/v1/models").reason
            raise InputError(
                f"config.llm.url: {self.url} does not list its models ({reason}); start the "
                "server, or leave the url empty to have one started."
            )
        if self.name not in names:
            raise InputError(
                f"config.llm.model: {self.url} serves {', '.join(names)}, not {self.name!r}; give "
                "one of its names."
            )
        return self

    def stop(self) -> None:
        """Does nothing: we did not start the server."""


@dataclasses.dataclass(frozen=True)
class Place:
    workdir: Path  # folder of the answers and of the server's log
    digests: Path  # folder of the digests of models
    host: int = 0  # number of this host, if there are several; hosts do not share files

    def own(self, name: str) -> str:
        if not (name and self.host):
            return name
        path = Path(name)
        return str(path.with_name(f"{path.stem}-{self.host}{path.suffix}"))


def server_of(
    llm: LlmConfig | ServedConfig, place: Place, **hooks: Callable[..., None]
) -> Server | Existing:
    """The server of `config.llm`, not yet started: a running one, or one of our own.

    Its log is in the workdir, one of each host, unless the log's path is absolute; `hooks` are
    those of `Server`.
    """
    if llm.url:
        client = llm.client(llm.url, llm.model)
        return Existing(client.url, llm.model, client.api_key())
    assert llm.server is not None
    config = dataclasses.replace(
        llm.server,
        name=llm.server.name or llm.model,
        log=str(place.workdir / Path(place.own(llm.server.log)).expanduser()),
        api_key_env=llm.api_key_env,
    )
    interpreter(config.python)
    config.api_key()
    return Server(config, **hooks)


@contextlib.contextmanager
def started(server: Server | Existing) -> Iterator[Callable[[StopSignal], None]]:
    """Starts a server while the caller goes on; it ends with the block.

    Yields a function that waits until it answers; it raises `Stopped` if the run is to stop first.
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
        starting.cancel()
        server.stop()  # a server that is starting gives up; one that has not begun does not begin
        pool.shutdown()
        server.stop()


@dataclasses.dataclass
class Model:
    """The language model of the section `llm`, and its client once `wait` has returned."""

    generation: Generation  # how answers are sampled and read
    provenance: dict[str, Any]  # what an answer depends on besides its prompt, as JSON
    lost: Callable[[], str]  # returns why the server was given up; "" if it was not
    ready: Callable[[StopSignal], Client]
    client: Client | None = None

    def wait(self, stop: StopSignal) -> Client:
        """Waits for the server; raises `Stopped` if the run is to stop first."""
        if self.client is None:
            self.client = self.ready(stop)
        return self.client

    @property
    def kept(self) -> str:
        """Where answers are kept, as the end of a sentence on those that cannot be read."""
        cache = self.client.config.cache if self.client is not None else ""
        return f"; of the replies, those that can be read are kept in {cache}" if cache else ""


@contextlib.contextmanager
def open_model(llm: LlmConfig, place: Place, seed: int, log: Log) -> Iterator[Model]:
    """Opens the server that `llm` asks for, and its client; both end with the block.

    `seed` is that of sampling if the temperature is not 0 and `llm.seed` is None.
    """
    version = llm.version
    if not llm.url and llm.server is not None and not version:
        # Folders of the same name may hold different weights; their answers must not be mixed.
        version = served_version(llm.server, place.digests, log)
    server = server_of(llm, place, log=log)
    generation = _generation(llm, seed)
    # The folder of an equal model may have another name.
    drawn = {n: value for n, value in vars(generation).items() if n not in ("count", "tokenizer")}
    sampled = {f"{PREFIX}{name}": value for name, value in drawn.items()}
    depends = {"the model": server.name, f"{PREFIX}version": version, **sampled}
    with started(server) as wait, contextlib.ExitStack() as stack:

        def ready(stop: StopSignal) -> Client:
            from qrag_jax.llm.client import Client

            wait(stop)
            cache = str(place.workdir / place.own(llm.cache)) if llm.cache else ""
            config = llm.client(server.url, server.name, version=version, cache=cache)
            return stack.enter_context(Client(config, log))

        yield Model(generation, depends, lambda: server.failure, ready)


def _generation(llm: LlmConfig, seed: int) -> Generation:
    changes: dict[str, Any] = {}
    if llm.temperature > 0 and llm.seed is None:
        changes["seed"] = seed
    if not llm.url and llm.server is not None:
        room, answer = llm.server.max_model_len, llm.max_tokens
        if answer >= room > 0:
            raise InputError(
                f"config.llm.max_tokens is {answer}, but the server is to hold {room} tokens of "
                "prompt and answer together (config.llm.server.max_model_len); lower the one or "
                "raise the other."
            )
        changes |= {
            "max_prompt_tokens": llm.max_prompt_tokens or (room - answer if room else 0),
            "tokenizer": llm.tokenizer or llm.server.model,
            "enable_thinking": bool(llm.enable_thinking),
        }
    return Generation.of(vars(llm) | changes, prefix=PREFIX)

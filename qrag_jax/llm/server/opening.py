"""Opens the language model of the section `llm`: its server, if it is ours, and its client.

Our server starts while the caller goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrag_jax.errors import InputError
from qrag_jax.llm.config import PREFIX, LlmConfig, ServedConfig, ServerConfig, interpreter
from qrag_jax.llm.endpoint import Endpoint, read_key
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.text.generation import Generation
from qrag_jax.runtime.interrupt import StopSignal, wait_for
from qrag_jax.runtime.whole_files import model_digest

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


def of_host(name: str, host: int) -> str:
    """A file's name for one of several hosts, since hosts do not share files."""
    if not (name and host):
        return name
    path = Path(name)
    return str(path.with_name(f"{path.stem}-{host}{path.suffix}"))


def server_of(
    llm: LlmConfig | ServedConfig, workdir: Path, host: int = 0, **hooks: Callable[..., None]
) -> Server | Existing:
    """The server of `config.llm`, not yet started: a running one, or one of our own.

    Its log is in the workdir, one of each host (by its number), unless the log's path is absolute;
    `hooks` are those of `Server`.
    """
    if llm.url:
        client = llm.client(llm.url, llm.model)
        return Existing(client.url, llm.model, client.api_key())
    assert llm.server is not None
    config = dataclasses.replace(
        llm.server,
        name=llm.server.name or llm.model,
        log=str(workdir / Path(of_host(llm.server.log, host)).expanduser()),
    )
    interpreter(config.python)
    read_key(llm.api_key_env, f"{PREFIX}api_key_env")  # refused before the server starts
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
        wait_for(starting, stop.check)

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

    def wait(self, stop: StopSignal) -> None:
        """Waits for the server; raises `Stopped` if the run is to stop first."""
        self.client = self.client or self.ready(stop)


@contextlib.contextmanager
def open_model(
    llm: LlmConfig, workdir: Path, seed: int, log: Log, host: int = 0
) -> Iterator[Model]:
    """Opens the server that `llm` asks for, and its client; both end with the block.

    The answers and the server's log are in the workdir. `seed` is that of sampling if the
    temperature is not 0 and `llm.seed` is None.
    """
    version = llm.version
    if not llm.url and llm.server is not None and not version:
        # Folders of the same name may hold different weights; their answers must not be mixed.
        version = served_version(llm.server, log)
    server = server_of(llm, workdir, host, log=log)
    generation = _generation(llm, seed)
    # The folder of an equal model may have another name.
    drawn = {n: value for n, value in vars(generation).items() if n not in ("count", "tokenizer")}
    sampled = {f"{PREFIX}{name}": value for name, value in drawn.items()}
    depends = {"the model": server.name, f"{PREFIX}version": version, **sampled}
    with started(server) as wait, contextlib.ExitStack() as stack:

        def ready(stop: StopSignal) -> Client:
            from qrag_jax.llm.client import Client

            wait(stop)
            cache = str(workdir / of_host(llm.cache, host)) if llm.cache else ""
            config = llm.client(server.url, server.name, version=version, cache=cache)
            return stack.enter_context(Client(config, log))

        yield Model(generation, depends, lambda: server.failure, ready)


def served_version(server: ServerConfig, log: Log) -> str:
    """A digest of what decides on our own server's answers: weights, dtype and arguments.

    Arguments can select other revisions, other templates, or other ways to load and to round. Of a
    model on the hub the present weights are not known here.
    """
    weights = model_digest(Path(server.model).expanduser(), log)
    parts = json.dumps([weights, server.dtype, server.arguments])
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


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

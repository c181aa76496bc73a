"""The language model of the section `llm`: a vLLM server of our own, or one that runs; its client.

Our server has a separate Python environment and separate processes. They run under `watchdog`,
which stops them when this process is gone. It listens on a Unix socket in a folder that only this
user may enter, so the kernel keeps everyone else out. It starts while the caller goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrag_jax.errors import InputError
from qrag_jax.llm.config import PREFIX, LlmConfig, ServedConfig, ServerConfig, interpreter
from qrag_jax.llm.endpoint import UNIX, Endpoint, read_key
from qrag_jax.llm.server import watchdog
from qrag_jax.llm.text.generation import Generation
from qrag_jax.runtime.interrupt import StopSignal, wait_for
from qrag_jax.runtime.line_process import end_group, has_ended
from qrag_jax.runtime.whole_files import model_digest, weights_folder, writing

if TYPE_CHECKING:  # it takes a while to import, and runs without a model do not need it
    from qrag_jax.llm.client import Client

Log = Callable[[str], None]

LOOK_EVERY = 0.2  # seconds
LOG_EVERY = 10.0  # seconds between two lines while the server starts
LONGEST_BACKOFF = 60.0
HEALTHY_AFTER = 300.0  # seconds of service, after which restarts are counted from zero again


class Server:
    """A vLLM process that is kept running. It is started once and cannot be started after `stop`.

    As a context manager, it starts on entry, which does not wait for it, and none of its processes
    is left on exit. In between, a thread restarts it when it dies (`restarts` times), with growing
    pauses, at the same `url`; where it was given up, `failure` says why. After a restart it serves
    its original weights; use `on_up` to hand over newer ones.
    """

    def __init__(
        self,
        config: ServerConfig,
        log: Log = print,
        *,
        on_down: Callable[[], None] = lambda: None,
        on_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_down` and `on_up` are called in the thread that watches."""
        self.config, self.name, self.url = config, config.served_name, ""
        self.failure = ""
        self._log, self._on_down, self._on_up = log, on_down, on_up
        self._closing = contextlib.ExitStack()
        self._socket = Path()
        self._written = ServerLog(Path(config.log).expanduser().absolute())
        self._process: subprocess.Popen[bytes] | None = None
        self._ready, self._stopping = Future[None](), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm-watch", daemon=True)

    def __enter__(self) -> Server:
        self._socket = self._closing.enter_context(weights_folder()) / "vllm.sock"
        self.url = f"{UNIX}{self._socket}"
        self._thread.start()
        return self

    def wait(self, check: Callable[[], object] = lambda: None) -> None:
        """Waits until it answers, or raises why it does not; meanwhile `check` may raise."""
        wait_for(self._ready, check)

    def __exit__(self, *error: object) -> None:
        """Stops the server: SIGTERM, SIGKILL after `stop_grace`."""
        self._stopping.set()
        self._thread.join()  # it may be in the middle of a start
        self._end()
        self._closing.close()

    # ---------------------------------------------------------------- one process

    def _launch(self) -> None:
        self._socket.unlink(missing_ok=True)  # that of the process before: vLLM takes none
        guard = [sys.executable, "-I", watchdog.__file__, str(self.config.stop_grace)]
        with writing(self._written.path, "config.llm.server.log"):
            self._written.path.parent.mkdir(parents=True, exist_ok=True)
            with self._written.path.open("ab") as log:
                log.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} start\n".encode())
                log.flush()
                self._written.start = log.tell()
                self._process = subprocess.Popen(  # noqa: S603  (a list, no shell)
                    [*guard, *self.config.command(self._socket)],
                    stdin=subprocess.PIPE,  # closed by us, or at our death: watchdog stops
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.config.environment(),
                    start_new_session=True,
                )
        self._await_ready(self._process)

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        began = logged = time.monotonic()
        endpoint = Endpoint(self.url)
        while not self._stopping.is_set():
            if has_ended(process):
                raise InputError(f"vLLM died at start; {self._written.last_words()}")
            now = time.monotonic()
            # The server must be healthy, and the model's name must be among those it serves.
            if endpoint.get("/health").status == 200 and self.name in endpoint.model_names():
                self._log(f"vLLM serves {self.name} at {self.url} ({now - began:.0f} s).")
                return
            if now - began > self.config.start_timeout:
                raise InputError(
                    f"vLLM did not answer within {self.config.start_timeout:g} s "
                    f"(config.llm.server.start_timeout); {self._written.last_words()}"
                )
            if now - logged >= LOG_EVERY:
                logged, last = now, self._written.tail(1) or ["…"]
                self._log(f"vLLM is starting, {now - began:.0f} s: {last[0]}")
            self._stopping.wait(LOOK_EVERY)
        raise InputError("the server of config.llm.server was stopped while it started.")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        end_group(process, self.config.stop_grace + 5.0)
        # Killed processes take a moment to disappear and to free their GPU memory.
        limit = time.monotonic() + 5.0
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < limit:
                os.killpg(process.pid, 0)
                time.sleep(LOOK_EVERY / 4)

    # ---------------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        try:
            self._launch()
        except Exception as error:
            self._end()
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            self._keep_up()
        except Exception as error:  # nothing else notices if this thread ends
            self.failure = f"vLLM was given up: {type(error).__name__}: {error}"
            raise
        finally:
            if self.failure:
                self._log(self.failure)

    def _keep_up(self) -> None:
        attempts, why = 0, ""
        while True:
            if not why:
                began = time.monotonic()
                assert self._process is not None
                while not has_ended(self._process):
                    if self._stopping.wait(LOOK_EVERY):
                        return
                why = "it died"
                self._on_down()
                if time.monotonic() - began > HEALTHY_AFTER:
                    attempts = 0
            self._end()
            if attempts >= self.config.restarts:
                given_up = f"vLLM was given up after {attempts} restarts in a row: {why}"
                self.failure = f"{given_up}; see {self._written.path}"
                return
            pause = min(self.config.backoff * 2**attempts, LONGEST_BACKOFF)
            attempts += 1
            restart = f"restart {attempts} of {self.config.restarts} in {pause:g} s"
            self._log(f"vLLM is down ({why}); {restart}. {self._written.last_words()}")
            if self._stopping.wait(pause):
                return
            try:
                self._launch()
                self._on_up()
                why = ""
            except Exception as error:  # after a failed hand-over it cannot be trusted
                why = str(error).partition("\n")[0] or type(error).__name__
                if self._stopping.is_set():
                    return


LAST_LINES = 15  # shown when the server dies
READ_BYTES = 1 << 20  # at the end of what the present process wrote
LONGEST_ERROR = 600  # characters

# An exception's last line, with or without vLLM's own words before it, such as
# "(EngineCore pid=1) ERROR 11-26 09:10:12 [core.py:1510] ValueError: …".
_ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception|Exit)): (\S.*)")


class ServerLog:
    """The log file of one server; `start` is where the present process began in it, in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0

    def tail(self, count: int) -> list[str]:
        return self._lines()[-count:]

    def last_words(self) -> str:
        error = next(filter(None, map(_ERROR.search, self._lines())), None)
        shown = f"{error[1]}: {error[2]}"[:LONGEST_ERROR] if error else ""
        first = f"the first error in its log is {shown}; " if shown else ""
        lines = "".join(f"\n    {line}" for line in self.tail(LAST_LINES))
        return f"{first}the last lines of its log {self.path}:{lines}"

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError), self.path.open("rb") as log:
            log.seek(max(self.start, log.seek(0, os.SEEK_END) - READ_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
            return [line.strip() for line in lines if line.strip()]
        return []


# ---------------------------------------------------------------- the section `llm`


@dataclasses.dataclass
class Existing:
    """A running server that we did not start."""

    url: str
    name: str
    failure = ""

    def wait(self, check: Callable[[], object]) -> None:
        """It runs already."""


def of_host(name: str, host: int) -> str:
    """A file's name for one of several hosts, since hosts do not share files."""
    if not (name and host):
        return name
    path = Path(name)
    return str(path.with_name(f"{path.stem}-{host}{path.suffix}"))


@contextlib.contextmanager
def open_server(
    llm: LlmConfig | ServedConfig, workdir: Path, host: int = 0, **hooks: Callable[..., None]
) -> Iterator[Server | Existing]:
    """The server of `config.llm`: a running one, or one of our own, which ends with the block.

    Ours starts while the caller goes on; `wait` waits until it answers. Its log is in the workdir,
    one of each host (by its number), unless the log's path is absolute; `hooks` are those of
    `Server`.
    """
    if llm.url:
        yield _running(llm)
        return
    assert llm.server is not None
    config = dataclasses.replace(
        llm.server,
        name=llm.server.name or llm.model,
        log=str(workdir / Path(of_host(llm.server.log, host)).expanduser()),
    )
    interpreter(config.python)
    read_key(llm.api_key_env, f"{PREFIX}api_key_env")  # refused before the server starts
    with Server(config, **hooks) as server:
        yield server


def _running(llm: LlmConfig | ServedConfig) -> Existing:
    """Checks that the server at `llm.url` serves the model."""
    client = llm.client(llm.url, llm.model)
    endpoint = Endpoint(client.url, client.api_key())
    names = endpoint.model_names()
    if not names:
        raise InputError(
            f"config.llm.url: no models at {client.url} ({endpoint.get('/v1/models').reason})."
        )
    if llm.model not in names:
        raise InputError(f"config.llm.model is {llm.model!r}; {llm.url} serves {', '.join(names)}.")
    return Existing(client.url, llm.model)


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
    generation = _generation(llm, seed)
    # The folder of an equal model may have another name.
    drawn = {n: value for n, value in vars(generation).items() if n not in ("count", "tokenizer")}
    sampled = {f"{PREFIX}{name}": value for name, value in drawn.items()}
    with open_server(llm, workdir, host, log=log) as server, contextlib.ExitStack() as stack:

        def ready(stop: StopSignal) -> Client:
            from qrag_jax.llm.client import Client

            server.wait(stop.check)
            cache = str(workdir / of_host(llm.cache, host)) if llm.cache else ""
            config = llm.client(server.url, server.name, version=version, cache=cache)
            return stack.enter_context(Client(config, log))

        depends = {"the model": server.name, f"{PREFIX}version": version, **sampled}
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
                f"config.llm.max_tokens is {answer} and config.llm.server.max_model_len, of prompt "
                f"and answer together, {room}; lower the one or raise the other."
            )
        changes |= {
            "max_prompt_tokens": llm.max_prompt_tokens or (room - answer if room else 0),
            "tokenizer": llm.tokenizer or llm.server.model,
            "enable_thinking": bool(llm.enable_thinking),
        }
    return Generation.of(vars(llm) | changes, prefix=PREFIX)

"""The server that `config.llm` asks for: one that is already running, or one of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.server.server_config import ServerConfig, interpreter


class Existing:
    """A running server that we did not start, with the interface of `Server`.

    Attributes:
        url: its base URL, with /v1.
        name: the model that clients ask for.
    """

    failure = ""

    def __init__(self, url: str, name: str, api_key: str = "") -> None:
        self.url, self.name = url.rstrip("/"), name
        self._endpoint = Endpoint(self.url, api_key)

    def start(self) -> Existing:
        """Checks that the server answers and serves the model."""
        reply = self._endpoint.get("/v1/models")
        if reply.status != 200:
            raise InputError(
                f"config.llm.url: {self.url} does not list its models ({reply.reason}); start "
                "the server, or leave the url empty to have one started."
            )
        names = self._endpoint.model_names()
        if self.name not in names:
            raise InputError(
                f"config.llm.model: {self.url} serves {', '.join(names) or 'no model'}, not "
                f"{self.name!r}; give one of its names."
            )
        return self

    def stop(self) -> None:
        """Does nothing: we did not start the server."""

    def __enter__(self) -> Existing:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def sidecar(
    llm: Mapping[str, Any],
    folder: Path,
    api_key: str = "",
    *,
    may_move: bool = True,
    **hooks: Callable[..., None] | None,
) -> Server | Existing:
    """The server of `config.llm`, not yet started.

    Args:
        llm: the config's fields; `url`, `model`, `api_key_env` and `server` are read.
        folder: folder of the log file, unless the log's path is absolute.
        api_key: key of a server that is already running.
        may_move: see `Server`.
        hooks: `log`, `on_down` and `on_up` of `Server`.
    """
    if llm.get("url"):
        return Existing(llm["url"], llm.get("model", ""), api_key)
    fields = dict(llm["server"])
    log = folder / Path(fields.get("log") or "vllm.log").expanduser()
    config = ServerConfig.of(
        fields,
        name=fields.get("name") or llm.get("model", ""),
        log=str(log),
        api_key_env=llm.get("api_key_env", ""),
    )
    interpreter(config.python)
    config.api_key()
    return Server(config, may_move=may_move, **hooks)  # type: ignore[arg-type]

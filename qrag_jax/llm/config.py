"""The sections `llm` of configs: which model is asked or trained, on which server, and how."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from qrag_jax.errors import Count, Filled, InputError, Positive, Weight
from qrag_jax.llm.endpoint import UNIX, check_url, check_variable, read_key
from qrag_jax.llm.server.server_config import ServerConfig
from qrag_jax.llm.text.generation import Drawing
from qrag_jax.runtime.config_fields import check, internal

PREFIX = "config.llm."  # of the fields, in messages
# The ranks that vLLM has room for (vllm.config.lora.MaxLoRARanks); one between needs the next.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Limits:
    concurrency: Count = 32  # requests sent at once
    # seconds for one request from its first attempt, with all attempts and the pauses between them.
    # Time spent waiting for a server that is down does not count
    deadline: Positive = 300.0
    attempt_timeout: Positive = 120.0  # seconds for one attempt
    attempts: Count = 5  # per request, at most
    # name of the environment variable with the server's API key; "": no key is needed
    api_key_env: str = ""


@dataclasses.dataclass(frozen=True)
class ClientConfig(_Limits):
    """Settings of a `Client`; most are fields of `config.llm`, all are flags of `answer`."""

    # of the server, such as http://127.0.0.1:8000/v1, or unix:/PATH of its socket; /v1 is added to
    # a URL without a path
    url: str
    model: Filled  # name that the server serves
    version: str = ""  # of the weights, part of the cache key and of answers
    # how many of the attempts may end in an answer that is malformed, empty or without a known end
    bad_answer_attempts: Count = 2
    retry_pause: Weight = 0.5  # seconds before the second attempt; doubles, with jitter, up to 8 s
    # seconds without a connection after which requests fail; None: they wait for ever
    wait_limit: Weight | None = None
    # SQLite file of answers at temperature 0; "": no cache. Any number of processes may share it if
    # it is on a local disk
    cache: str = ""
    # put before the fields' names in messages, such as "config.llm." or "--llm."
    prefix: str = internal("")

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url(self.url, self.prefix))
        check(self, self.prefix)
        check_variable(self.api_key_env, f"{self.prefix}api_key_env")

    def api_key(self) -> str:
        """The key from the environment; "" if none is needed."""
        return read_key(self.api_key_env, f"{self.prefix}api_key_env")


def _checked_url(url: str, prefix: str) -> str:
    if url.startswith(UNIX):
        if not Path(url.removeprefix(UNIX)).is_absolute():
            raise InputError(f"{prefix}url is {url!r}; give the absolute path of a Unix socket.")
        return url
    parts = check_url(url, f"{prefix}url", "http://127.0.0.1:8000/v1", f"{prefix}api_key_env")
    return (url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1").rstrip("/")


class Needs(NamedTuple):
    rank: int  # of the adapters that are trained; 0: all weights are
    versions: int  # adapters that are loaded at a time, K + 2
    room: int  # tokens of the longest prompt and answer together


@dataclasses.dataclass(frozen=True)
class _Section(_Limits):
    url: str = ""  # of a running server, such as http://127.0.0.1:8000/v1; "": start one
    model: str = ""  # its name on the server; "" if we start it: its folder's or hub name
    server: ServerConfig | None = None  # vLLM server, started if url is ""

    def client(self, url: str, model: str, version: str = "", cache: str = "") -> ClientConfig:
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(_Limits)}
        return ClientConfig(url, model, version, cache=cache, prefix=PREFIX, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedConfig(_Section):
    """Section `llm` of a policy that is trained: where the server is that samples its turns."""

    concurrency: Count = 256  # turns asked for at once
    deadline: Positive = 600.0  # seconds for a turn with all its attempts
    attempt_timeout: Positive = 300.0  # seconds for one attempt

    def fitted(self, needs: Needs) -> ServedConfig:
        """With what the training itself knows of our own server, and need not be written."""
        if self.url:
            self.client(self.url, self.model)
            if not needs.rank:
                raise InputError(
                    "config.llm.url names a running server, and config.model.lora.rank is 0: all "
                    "weights are exchanged only on a server that this run starts, since another "
                    "one might restart with the first weights unnoticed; leave the url empty, or "
                    "train adapters."
                )
            return dataclasses.replace(self, server=None)
        server = self.server or ServerConfig()
        room = server.max_model_len or needs.room
        if room < needs.room:
            raise InputError(
                f"config.llm.server.max_model_len is {room}, and an episode may have "
                f"{needs.room} tokens (config.sampling.room); raise it, or leave it 0."
            )
        server = dataclasses.replace(
            server,
            publish=True,
            lora_rank=_rank(server.lora_rank, needs.rank),
            loaded_adapters=max(server.loaded_adapters, needs.versions),
            max_model_len=room,
        )
        return dataclasses.replace(self, server=server)

    def serving(self, folder: str, dtype: str) -> ServedConfig:
        """With the folder of the model that is trained, unless another one is named.

        "auto" becomes `dtype`, that of the trainer's products.
        """
        if self.server is None:
            return self
        dtype = dtype if self.server.dtype == "auto" else self.server.dtype
        model = self.server.model or folder
        server = dataclasses.replace(self.server, model=model, dtype=dtype)
        return dataclasses.replace(self, server=server)


def _rank(given: int, needed: int) -> int:
    """The rank that the server is started with; 0: without adapters."""
    if not needed:
        return 0
    if 0 < given < needed:
        raise InputError(
            f"config.llm.server.lora_rank is {given}, and the adapters' rank "
            f"(config.model.lora.rank) is {needed}; raise it, or leave it 0."
        )
    if needed > RANKS[-1]:
        raise InputError(
            f"config.model.lora.rank is {needed}, and vLLM takes ranks up to {RANKS[-1]}; lower "
            "it, or set config.sampling.engine to device."
        )
    return next(rank for rank in RANKS if rank >= max(given, needed))


@dataclasses.dataclass(frozen=True)
class LlmConfig(Drawing, _Section):
    """Section `llm` of a model that answers."""

    version: str = ""  # of the weights, part of the cache key; "": a digest if we start the server
    cache: str = "answers.sqlite"  # file of greedy answers, in the workdir; "": no cache

    def asked(self, asks: str) -> LlmConfig:
        if self.url:
            self.client(self.url, self.model)
            return dataclasses.replace(self, server=None)
        if self.server is None or not self.server.model:
            raise InputError(
                f"{asks} needs a language model: give config.llm.url=http://HOST:PORT/v1 and "
                "config.llm.model=NAME of a server that runs, or config.llm.server.model=FOLDER or "
                "hub name, of which a server is started here."
            )
        return self

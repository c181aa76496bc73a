"""The config section `llm` of a policy that is sampled by a server: vLLM, with newer weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from qrag_jax.errors import InputError, check_above, check_least
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.server.server_config import ServerConfig
from qrag_jax.runtime.config_fields import internal

PREFIX = "config.llm."  # of the fields, in messages
# The ranks that vLLM has room for (vllm.config.lora.MaxLoRARanks); one between needs the next.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NOT_KNOWN_YET = "not/known-yet"  # has the form of a hub name
_ANY_URL = "http://127.0.0.1:1"


class Needs(NamedTuple):
    """What a training needs of the server.

    Attributes:
        rank: of the adapters that are trained; 0: all weights are.
        versions: adapters that are loaded at a time, K + 2.
        room: tokens of the longest prompt and answer together.
    """

    rank: int
    versions: int
    room: int


@dataclasses.dataclass(frozen=True)
class ServedConfig:
    """Section `llm`: where the server is that samples, and how it is asked."""

    url: str = ""  # of a running server, such as http://127.0.0.1:8000/v1; "": start one
    model: str = ""  # its name on the server; "" if we start it: its folder's name
    api_key_env: str = ""  # environment variable that holds the server's API key; "": no key
    concurrency: int = 256  # turns asked for at once
    deadline: float = 600.0  # seconds for a turn with all its attempts
    attempt_timeout: float = 300.0  # seconds for one attempt
    attempts: int = 5  # per turn, at most
    server: ServerConfig | None = internal()  # section llm.server; None: a server runs already

    def __post_init__(self) -> None:
        self.client(self.url or _ANY_URL, self.model if self.url else "any")

    @classmethod
    def of(cls, fields: Mapping[str, Any], needs: Needs) -> ServedConfig:
        """Reads the section; what the training itself knows of the server needs not be written.

        Of our own server these fields are then set: `publish`; `lora_rank` and `max_model_len` if
        they are 0; `loaded_adapters` if it is too low. `serving` sets others.
        """
        rest = dict(fields)
        given = dict(rest.pop("server", None) or {})
        names = [field.name for field in dataclasses.fields(cls) if field.name != "server"]
        if unknown := sorted(set(rest) - set(names)):
            raise InputError(f"{PREFIX}{unknown[0]} is unknown; there are {', '.join(names)}.")
        if rest.get("url"):
            if not needs.rank:
                raise InputError(
                    "config.llm.url names a running server, and config.model.lora.rank is 0: all "
                    "weights are exchanged only on a server that this run starts, since another "
                    "one might restart with the first weights unnoticed; leave the url empty, or "
                    "train adapters."
                )
            return cls(**rest)
        given["model"] = given.get("model") or _NOT_KNOWN_YET
        given["publish"] = True
        given["lora_rank"] = _rank(given.get("lora_rank", 0), needs.rank)
        given["loaded_adapters"] = max(given.get("loaded_adapters", 1), needs.versions)
        room = given.get("max_model_len", 0) or needs.room
        if room < needs.room:
            raise InputError(
                f"config.llm.server.max_model_len is {room}, and an episode may have "
                f"{needs.room} tokens (config.sampling.room); raise it, or leave it 0."
            )
        given["max_model_len"] = room
        return cls(**rest, server=ServerConfig.of(given))

    def serving(self, folder: str, dtype: str) -> ServedConfig:
        """With the model that is trained, unless another one is named, and in the trainer's dtype.

        Args:
            folder: of the model.
            dtype: of the trainer's products, where the config says "auto".
        """
        if self.server is None:
            return self
        changes: dict[str, Any] = {}
        if self.server.model == _NOT_KNOWN_YET:
            changes["model"] = folder
        if self.server.dtype == "auto":
            changes["dtype"] = dtype
        return dataclasses.replace(self, server=dataclasses.replace(self.server, **changes))

    def client(self, url: str, model: str) -> ClientConfig:
        """Settings of the client."""
        names = ("concurrency", "deadline", "attempt_timeout", "attempts", "api_key_env")
        fields = {name: getattr(self, name) for name in names}
        return ClientConfig(url, model, prefix=PREFIX, **fields)


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
class LlmConfig:
    """Section `llm`; `ClientConfig` and `Generation` check the other fields that they use."""

    url: str = ""  # of a running server, such as http://127.0.0.1:8000/v1; "": start one
    model: str = ""  # its name on the server; "" if we start it: its folder's or hub name
    api_key_env: str = ""  # environment variable that holds the server's API key; "": no key
    version: str = ""  # of the weights, part of the cache key; "": a digest if we start the server
    temperature: float = 0.0  # of sampling; 0: greedy, and answers are cached
    max_tokens: int = 256  # longest answer, including its thinking
    top_p: float | None = None  # nucleus sampling; None: the server's default
    seed: int | None = None  # of sampling if the temperature is not 0; None: config.seed
    # Whether a thinking model thinks; None: off on our own server, else the server's default
    enable_thinking: bool | None = None
    cut_off: str = "fail"  # answers cut off by max_tokens: fail, or score as if complete
    # Longer prompts lose their oldest chunks; 0: what max_tokens leaves on our server, or no limit
    max_prompt_tokens: int = 0
    tokenizer: str = ""  # folder or hub name, counts prompt tokens; "": that of llm.server.model
    concurrency: int = 32  # requests sent at once
    deadline: float = 300.0  # seconds for a request with all its attempts
    attempt_timeout: float = 120.0  # seconds for one attempt
    attempts: int = 5  # per request, at most
    cache: str = "answers.sqlite"  # file of greedy answers, in the workdir; "": no cache
    server: ServerConfig | None = None  # vLLM server, started if url is ""

    def __post_init__(self) -> None:
        least = {"max_tokens": 1, "max_prompt_tokens": 0, "concurrency": 1, "attempts": 1}
        check_least("llm", self, **least)
        check_above("llm", self, "deadline", "attempt_timeout")

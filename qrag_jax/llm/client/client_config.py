"""Settings of the client: where the model server is, time limits, retries and the cache."""

from __future__ import annotations

import dataclasses

from qrag_jax.errors import InputError
from qrag_jax.llm.server_url import check_url, check_variable, is_local, read_key
from qrag_jax.runtime.config_fields import internal


@dataclasses.dataclass(frozen=True)
class ClientConfig:
    """Settings of a `Client`; most are fields of `config.llm`, all are flags of `answer`.

    Attributes:
        url: of the server, such as http://127.0.0.1:8000/v1; /v1 is added to a URL without a path.
        model: name that the server serves.
        version: of the weights, part of the cache key and of answers.
        concurrency: requests sent at once.
        deadline: seconds for one request from its first attempt, with all attempts and the pauses
            between them. Time spent waiting for a server that is down does not count.
        attempt_timeout: seconds for one attempt.
        attempts: per request, at most.
        bad_answer_attempts: how many of the attempts may end in an answer that is malformed, empty
            or without a known end.
        retry_pause: seconds before the second attempt; doubles, with jitter, up to 8 s.
        wait_limit: seconds without a connection after which requests fail; None: they wait for
            ever.
        cache: SQLite file of answers at temperature 0; "": no cache. Any number of processes may
            share it if it is on a local disk.
        api_key_env: name of the environment variable with the API key; "": no key is needed.
        prefix: put before the fields' names in messages, such as "config.llm." or "--llm.".
    """

    url: str
    model: str
    version: str = ""
    concurrency: int = 32
    deadline: float = 300.0
    attempt_timeout: float = 120.0
    attempts: int = 5
    bad_answer_attempts: int = 2
    retry_pause: float = 0.5
    wait_limit: float | None = None
    cache: str = ""
    api_key_env: str = ""
    prefix: str = internal("")

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url(self.url, self.prefix))
        if not self.model:
            raise InputError(f"{self.prefix}model is empty; give the name that the server serves.")
        for name in ("concurrency", "attempts", "bad_answer_attempts"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"{self.prefix}{name} is {value}; use 1 or more.")
        for name in ("deadline", "attempt_timeout"):
            if not (value := getattr(self, name)) > 0:
                raise InputError(f"{self.prefix}{name} is {value}; use seconds above 0.")
        for name in ("retry_pause", "wait_limit"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise InputError(f"{self.prefix}{name} is {value}; use seconds of 0 or more.")
        check_variable(self.api_key_env, f"{self.prefix}api_key_env")

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine, so that no proxy is needed."""
        return is_local(self.url)

    def api_key(self) -> str:
        """The key from the environment; "" if none is needed."""
        return read_key(self.api_key_env, f"{self.prefix}api_key_env")


def _checked_url(url: str, prefix: str) -> str:
    parts = check_url(url, f"{prefix}url", "http://127.0.0.1:8000/v1", f"{prefix}api_key_env")
    return (url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1").rstrip("/")

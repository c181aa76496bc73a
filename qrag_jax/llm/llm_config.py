"""The language model beside the trainer: where it is, how it is asked, how texts are drawn."""

from __future__ import annotations

import dataclasses

from qrag_jax.llm.server.server_config import ServerConfig


@dataclasses.dataclass(frozen=True)
class LlmConfig:
    """Section `llm`; `ClientConfig` and `Generation` check their own fields."""

    url: str = ""  # of a server that is there, http://127.0.0.1:8000/v1; "": one is started
    model: str = ""  # name that the server knows it by; "": as its folder or on the hub
    api_key_env: str = ""  # environment variable that holds its API key, "": no key
    version: str = ""  # of its weights, part of what answers are kept by
    temperature: float = 0.0  # of answers; 0: greedy, and kept in the cache
    max_tokens: int = 256  # longest answer, thinking counted in
    top_p: float | None = None  # nucleus; None: the server's
    seed: int | None = None  # of draws where the temperature is not 0; None: config.seed
    # Of models that can think aloud first; None: off with a server of our own, untold to another
    enable_thinking: bool | None = None
    cut_off: str = "fail"  # what an answer is that max_tokens cut off: fail or score
    # Longer prompts lose their oldest chunks; 0: what a server of our own leaves, else no limit
    max_prompt_tokens: int = 0
    tokenizer: str = ""  # folder or hub name, counts them; "": that of llm.server.model
    concurrency: int = 32  # requests sent at once
    deadline: float = 300.0  # seconds for a request with all its attempts
    attempt_timeout: float = 120.0  # seconds for one attempt
    attempts: int = 5  # of one request at most
    cache: str = "answers.sqlite"  # greedy answers, in the workdir; "": none are kept
    server: ServerConfig | None = None  # vLLM where the url is ""

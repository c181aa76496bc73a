"""The config section `llm`: where the language model is, how it is asked, how it samples."""

from __future__ import annotations

import dataclasses

from qrag_jax.llm.server.server_config import ServerConfig


@dataclasses.dataclass(frozen=True)
class LlmConfig:
    """Section `llm`; `ClientConfig` and `Generation` check the fields that they use."""

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

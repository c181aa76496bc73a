"""The sections `llm` of configs: which model is asked or trained, on which server, and how."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Annotated, Any

from qrag_jax.errors import Count, Filled, InputError, Natural, Part, Positive, Rule, Weight, one_of
from qrag_jax.runtime.config_fields import SECRET, check, internal

FAIL, SCORE = "fail", "score"  # how an answer is read that max_tokens cut off
PREFIX = "config.llm."  # of the fields, in messages
# The ranks that vLLM has room for (vllm.config.lora.MaxLoRARanks); one between needs the next.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
OF_VLLM = ".venv-vllm/bin/python"
MODULE = "vllm.entrypoints.openai.api_server"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICES = Rule(re.compile(r"[\w-]*(,[\w-]+)*").fullmatch, "write them as '0,1'")
# Not passed on: with these variables vLLM's interpreter would use this environment's packages.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
# Nor are secrets that the server has no use for, nor what pip may have.
_OF_PIP = ("PIP_", "UV_")
# For models of the hub alone; a proxy's address may have a password.
_OF_THE_HUB = re.compile(r"HF_TOKEN|HUGGING_FACE_HUB_TOKEN|(HTTPS?|ALL)_PROXY")


# ---------------------------------------------------------------- a server of our own


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Section `llm.server`: settings of a `Server`; sizes in tokens, times in seconds.

    JAX takes three quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says less. On a
    shared GPU, this share and `memory_share` must fit together.

    With `publish`, the log-probabilities in answers are those of the distribution that was drawn
    from, as training needs them (vLLM 0.10.2 or newer).

    `publish` opens vLLM's development endpoints, which no API key protects: only this user can
    reach the server's socket.
    """

    model: str = ""  # folder of a Hugging Face model, or a hub name
    # model name that clients ask for; "": the folder's name or the hub name
    name: str = internal("")
    python: str = OF_VLLM  # Python of vLLM's environment (docs/language_model.md)
    devices: Annotated[str, _DEVICES] = ""  # CUDA_VISIBLE_DEVICES, such as "0,1"; "": the trainer's
    memory_share: Part = 0.45  # share of a GPU's memory, for weights and KV cache together
    max_model_len: Natural = 4096  # tokens of prompt and answer together; 0: the model's limit
    dtype: Annotated[str, one_of(DTYPES)] = "auto"  # of weights and computation
    lora_rank: Natural = 0  # highest rank of LoRA adapters served; 0: no adapters
    # LoRA adapters served at a time; K + 2 where a batch is played by the weights of K steps before
    loaded_adapters: Count = 2
    publish: bool = False  # new weights may be loaded; opens development endpoints
    # Further harmless vLLM arguments, with full names: ("--tensor-parallel-size", "2")
    arguments: tuple[str, ...] = ()
    log: Filled = "vllm.log"  # log file, in the workdir
    start_timeout: Positive = 1800.0  # seconds within which the server must answer
    stop_grace: float = internal(20.0)  # time from SIGTERM to SIGKILL
    restarts: Natural = 5  # restarts in a row before the server is given up
    # pause before the first restart; doubles for each further one, up to a minute
    backoff: float = internal(2.0)

    def __post_init__(self) -> None:
        if self.model:  # a training sets it to the model that is trained
            _check_model(self.model)

    @property
    def served_name(self) -> str:
        return self.name or (Path(self.model).resolve().name if self.is_folder else self.model)

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder on this machine; otherwise it is on the hub."""
        return Path(self.model).expanduser().is_dir()

    def command(self, socket: Path) -> list[str]:
        """The server's command line, without secrets: every user of the machine can read it."""
        model = str(Path(self.model).expanduser().resolve()) if self.is_folder else self.model
        # Of words that are given twice vLLM takes the last, so the user's own come first.
        words: list[Any] = [interpreter(self.python), "-m", MODULE, *self.arguments]
        # Its --uds overrides a host and a port.
        words += ["--uds", socket, "--model", model, "--served-model-name", self.served_name]
        words += ["--dtype", self.dtype, "--gpu-memory-utilization", self.memory_share]
        if self.max_model_len:
            words += ["--max-model-len", self.max_model_len]
        if self.lora_rank:
            words += ["--enable-lora", "--max-lora-rank", self.lora_rank]
            # One more in memory: the newest is loaded before the oldest is unloaded. Without room
            # vLLM itself drops the one that was not used for longest.
            words += ["--max-loras", self.loaded_adapters]
            words += ["--max-cpu-loras", self.loaded_adapters + 1]
        if self.publish:
            words += ["--logprobs-mode", "processed_logprobs"]
        return [*map(str, words)]

    def environment(self) -> dict[str, str]:
        """The server's environment variables, without secrets, which are known by their names.

        For a model of the hub there are the hub's token and the proxies.
        """

        def may_have(name: str) -> bool:
            if _OF_THE_HUB.fullmatch(name):
                return not self.is_folder
            is_ours = name in _NOT_INHERITED or name.startswith(_OF_PIP)
            return not is_ours and not SECRET.fullmatch(name)

        env = {name: value for name, value in os.environ.items() if may_have(name.upper())}
        names = ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
        env |= dict.fromkeys(names, "1")
        if self.is_folder:
            env["HF_HUB_OFFLINE"] = "1"  # the folder holds all files
        if self.devices:
            env["CUDA_VISIBLE_DEVICES"] = self.devices
        # Both are off without `publish`, even if the environment of this process turns them on.
        for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            env[name] = str(int(self.publish))
        return env


def interpreter(python: str) -> Path:
    """The absolute path of an environment's Python."""
    # Symbolic links are not followed: Python finds its environment by the link's path.
    path = Path(os.path.abspath(Path(python).expanduser()))
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise InputError(
            f"config.llm.server.python: {python} is not there; make an environment with vLLM: "
            f"python -m venv .venv-vllm && {OF_VLLM} -m pip install 'vllm>=0.14'"
        )
    return path


def _check_model(model: str) -> None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"config.llm.server.model: no config.json in {model}; give another.")
    elif folder.exists() or not HUB_NAME.fullmatch(model):
        raise InputError(f"config.llm.server.model is {model}; give a folder or hub name, org/name")


# ---------------------------------------------------------------- who is asked


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
    retry_pause: Weight = 0.5  # seconds before the second attempt; doubles, with jitter, up to 8 s
    # seconds without a connection after which requests fail; None: they wait for ever
    wait_limit: Weight | None = None
    # SQLite file of answers at temperature 0; "": no cache. Any number of processes may share it if
    # it is on a local disk
    cache: str = ""
    # put before the fields' names in messages, such as "config.llm." or "--llm."
    prefix: str = internal("")

    def __post_init__(self) -> None:
        from qrag_jax.llm import endpoint  # most trainings have no client

        object.__setattr__(self, "url", endpoint.usable_url(self.url, self.prefix))
        check(self, self.prefix)
        endpoint.check_variable(self.api_key_env, f"{self.prefix}api_key_env")

    def api_key(self) -> str:
        from qrag_jax.llm.endpoint import read_key

        return read_key(self.api_key_env, f"{self.prefix}api_key_env")


@dataclasses.dataclass(frozen=True)
class RerankerConfig:
    """Section `reranker`: a running model server with `/rerank`.

    HARR's reward `relevance` asks it, and RLVR's search in the place of `search.encoder`.
    """

    url: str = ""  # such as http://127.0.0.1:8002/v1
    model: str = ""  # its name on the server
    api_key_env: str = ""  # environment variable that holds the server's API key; "": no key

    @property
    def client(self) -> ClientConfig:
        key, prefix = self.api_key_env, "config.reranker."
        return ClientConfig(self.url, self.model, api_key_env=key, prefix=prefix)


@dataclasses.dataclass(frozen=True)
class _Section(_Limits):
    url: str = ""  # of a running server, such as http://127.0.0.1:8000/v1; "": start one
    model: str = ""  # its name on the server; "" if we start it: its folder's or hub name
    server: ServerConfig | None = None  # vLLM server, started if url is ""

    def client(self, url: str, model: str, version: str = "", cache: str = "") -> ClientConfig:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Limits)}
        return ClientConfig(url, model, version, cache=cache, prefix=PREFIX, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedConfig(_Section):
    """Section `llm` of a policy that is trained: where the server is that samples its turns."""

    concurrency: Count = 256  # turns asked for at once
    deadline: Positive = 600.0  # seconds for a turn with all its attempts
    attempt_timeout: Positive = 300.0  # seconds for one attempt

    def fitted(self, rank: int, versions: int, room: int) -> ServedConfig:
        """With what the training itself knows of our own server, and need not be written.

        Args:
            rank: of the adapters that are trained; 0: all weights are.
            versions: adapters that are loaded at a time, K + 2.
            room: tokens of the longest prompt and answer together.
        """
        if self.url:
            self.client(self.url, self.model)
            if not rank:
                raise InputError(
                    "config.model.lora.rank is 0, and only a server that this run starts takes all "
                    "weights, since it cannot restart unnoticed; leave out config.llm.url."
                )
            return dataclasses.replace(self, server=None)
        server = self.server or ServerConfig()
        highest = max(server.lora_rank, rank) if rank else 0
        if highest > RANKS[-1]:
            raise InputError(
                f"config.model.lora.rank is {highest}, and vLLM takes ranks up to {RANKS[-1]}; "
                "lower it, or set config.sampling.engine to device."
            )
        server = dataclasses.replace(
            server,
            publish=True,
            lora_rank=next(r for r in (0, *RANKS) if r >= highest),
            loaded_adapters=max(server.loaded_adapters, versions),
            max_model_len=max(server.max_model_len, room),
        )
        return dataclasses.replace(self, server=server)

    def serving(self, folder: str, dtype: str) -> ServedConfig:
        """With the folder of the trained model, if no other is named; "auto" becomes `dtype`."""
        if self.server is None:
            return self
        dtype = dtype if self.server.dtype == "auto" else self.server.dtype
        model = self.server.model or folder
        server = dataclasses.replace(self.server, model=model, dtype=dtype)
        return dataclasses.replace(self, server=server)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How answers are sampled and read, as fields of a config."""

    temperature: Weight = 0.0  # of sampling; 0: greedy, and answers are cached
    max_tokens: Count = 256  # longest answer, including its thinking
    top_p: Part | None = None  # nucleus sampling; None: the server's default
    seed: int | None = None  # of sampling if the temperature is not 0; None: config.seed
    # Whether a thinking model thinks; None: off on our own server, else the server's default
    enable_thinking: bool | None = None
    # answers cut off by max_tokens: fail, or score as if complete
    cut_off: Annotated[str, one_of((FAIL, SCORE))] = FAIL
    # Longer prompts lose their oldest chunks; 0: what max_tokens leaves on our server, or no limit
    max_prompt_tokens: Natural = 0
    tokenizer: str = ""  # folder or hub name, counts prompt tokens; "": that of llm.server.model


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
                "config.llm.model=NAME of a server, or config.llm.server.model=FOLDER to start one."
            )
        return self


def leave_room(llm: LlmConfig | ServedConfig) -> None:
    """Keeps JAX from taking the GPU memory that our own server needs on the same GPUs.

    It sets XLA_PYTHON_CLIENT_MEM_FRACTION. This has no effect after JAX has used a device, or if
    the user has set the variable.
    """
    if not llm.url and llm.server is not None and not llm.server.devices:
        left = max(0.95 - llm.server.memory_share, 0.05)
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{left:.2f}")

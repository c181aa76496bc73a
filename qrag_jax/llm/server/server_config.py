"""The config section `llm.server`: the settings with which vLLM is started."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Annotated, Any

from qrag_jax.errors import Count, Filled, InputError, Natural, Part, Positive, one_of, within
from qrag_jax.llm.endpoint import check_variable, read_key
from qrag_jax.runtime.config_fields import internal

HOST = "127.0.0.1"  # never another address: anyone who can reach the port can use the server
OF_VLLM = ".venv-vllm/bin/python"
MODULE = "vllm.entrypoints.openai.api_server"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Not passed on: with these variables vLLM's interpreter would use this environment's packages.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
# Nor are secrets that the server has no use for: keys of other services, and what pip may have.
_SECRET = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS)S?|(PIP|UV)_.*")
# For models of the hub alone; a proxy's address may have a password.
_OF_THE_HUB = re.compile(r"HF_TOKEN|HUGGING_FACE_HUB_TOKEN|(HTTPS?|ALL)_PROXY")


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Section `llm.server`: settings of a `Server`; sizes in tokens, times in seconds.

    JAX takes three quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says less. On a
    shared GPU, this share and `memory_share` must fit together.

    With `publish`, the log-probabilities in answers are those of the distribution that was drawn
    from, as training needs them (vLLM 0.10.2 or newer).

    `publish` opens vLLM's development endpoints. No API key protects them, and anyone who can reach
    a `port` can use them to stop the server or to make it read files. So give no `port` with it on
    a machine shared with users who are not trusted.
    """

    model: str = ""  # folder of a Hugging Face model, or a hub name
    # model name that clients ask for; "": the folder's name or the hub name
    name: str = internal("")
    python: str = OF_VLLM  # Python of vLLM's environment (docs/language_model.md)
    # on 127.0.0.1, for all users of the machine; 0: a socket for this one alone
    port: Annotated[int, within(0, 65535)] = 0
    devices: str = ""  # CUDA_VISIBLE_DEVICES, such as "0,1"; "": the trainer's
    memory_share: Part = 0.45  # share of a GPU's memory, for weights and KV cache together
    cpu_cache_gib: Natural = 0  # GiB of KV cache on CPU; 0: there is a GPU, or vLLM's default
    max_model_len: Natural = 4096  # tokens of prompt and answer together; 0: the model's limit
    dtype: Annotated[str, one_of(DTYPES)] = "auto"  # of weights and computation
    lora_rank: Natural = 0  # highest rank of LoRA adapters served; 0: no adapters
    # LoRA adapters served at a time; K + 2 where a batch is played by the weights of K steps before
    loaded_adapters: Count = 2
    publish: bool = False  # new weights may be loaded; opens development endpoints
    # Further harmless vLLM arguments, with full names: ("--tensor-parallel-size", "2")
    arguments: tuple[str, ...] = ()
    log: Filled = "vllm.log"  # log file, in the workdir
    # environment variable with the API key that the server requires; "": no key
    api_key_env: str = internal("")
    start_timeout: Positive = 1800.0  # seconds within which the server must answer
    stop_grace: float = internal(20.0)  # time from SIGTERM to SIGKILL
    restarts: Natural = 5  # restarts in a row before the server is given up
    # pause before the first restart; doubles for each further one, up to a minute
    backoff: float = internal(2.0)
    # time of service after which restarts are counted from zero again
    healthy_after: float = internal(300.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(self.arguments))
        if self.model:  # a training sets it to the model that is trained
            _check_model(self.model)
        if not re.fullmatch(r"[\w-]*(,[\w-]+)*", self.devices):
            raise InputError(f"{_field('devices')} is {self.devices!r}; write them as '0,1'.")
        if other := [word for word in self.arguments if not isinstance(word, str)]:
            raise InputError(f"{_field('arguments')}: {other[0]!r} is no text; write it in quotes.")
        check_variable(self.api_key_env, _field("api_key_env"))

    @property
    def served_name(self) -> str:
        return self.name or (Path(self.model).resolve().name if self.is_folder else self.model)

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder on this machine; otherwise it is on the hub."""
        return Path(self.model).expanduser().is_dir()

    def api_key(self) -> str:
        """The key from the environment; "" if the server requires none."""
        return read_key(self.api_key_env, _field("api_key_env"))

    def command(self, socket: Path) -> list[str]:
        """The server's command line, without secrets: every user of the machine can read it."""
        model = str(Path(self.model).expanduser().resolve()) if self.is_folder else self.model
        # Of words that are given twice vLLM takes the last, so the user's own come first.
        words: list[Any] = [interpreter(self.python), "-m", MODULE, *self.arguments]
        # Its --uds overrides a host and a port.
        words += ["--host", HOST, "--port", self.port] if self.port else ["--uds", socket]
        words += ["--model", model, "--served-model-name", self.served_name]
        words += ["--dtype", self.dtype, "--gpu-memory-utilization", self.memory_share]
        if self.max_model_len:
            words += ["--max-model-len", self.max_model_len]
        if self.lora_rank:
            words += ["--enable-lora", "--max-lora-rank", self.lora_rank]
            # One more in memory: the newest is loaded before the oldest is unloaded. Without room
            # vLLM itself drops the one that was not used for longest.
            words += ["--max-loras", self.loaded_adapters]
            words += ["--max-cpu-loras", self.loaded_adapters + 1]
        if self.cpu_cache_gib:
            # On CPU vLLM 0.32 ends when a prompt with a seed is read in parts ("CPU Generator does
            # not use offset").
            words += ["--no-enable-chunked-prefill"]
        if self.publish:
            # Of the distribution that was drawn from: at the temperature of sampling.
            words += ["--logprobs-mode", "processed_logprobs"]
        return [*map(str, words)]

    def environment(self) -> dict[str, str]:
        """The server's environment variables, including its API key but no other one.

        For a model of the hub there are the hub's token and the proxies, too. Variables are known
        as secret by their names.
        """

        def may_have(name: str) -> bool:
            if _OF_THE_HUB.fullmatch(name):
                return not self.is_folder
            return name not in _NOT_INHERITED and not _SECRET.fullmatch(name)

        env = {name: value for name, value in os.environ.items() if may_have(name.upper())}
        names = ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
        env |= dict.fromkeys(names, "1")
        if self.is_folder:
            env["HF_HUB_OFFLINE"] = "1"  # the folder holds all files
        if self.devices:
            env["CUDA_VISIBLE_DEVICES"] = self.devices
        if self.cpu_cache_gib:
            env["VLLM_CPU_KVCACHE_SPACE"] = str(self.cpu_cache_gib)
        # Both are off without `publish`, even if the environment of this process turns them on.
        for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            env[name] = str(int(self.publish))
        if self.api_key_env:
            env["VLLM_API_KEY"] = self.api_key()
        return env


def interpreter(python: str) -> Path:
    """The absolute path of an environment's Python.

    It does not follow symbolic links, because Python finds its environment by the link's path.
    """
    path = Path(os.path.abspath(Path(python).expanduser()))
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise InputError(
            f"{_field('python')}: {python} is not there; give the Python of an environment with "
            f"vLLM, which is made by: python -m venv .venv-vllm && {OF_VLLM} -m pip install "
            "'vllm>=0.14'"
        )
    return path


def _field(name: str) -> str:
    return f"config.llm.server.{name}"


def _check_model(model: str) -> None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(
                f"{_field('model')}: {model} has no config.json; give the folder of a "
                "Hugging Face model."
            )
    elif folder.exists() or not HUB_NAME.fullmatch(model):
        raise InputError(
            f"{_field('model')}: no folder {model}, and it is not a hub name of the form org/name "
            "either; give one of the two."
        )

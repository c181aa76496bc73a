"""What vLLM is started with, checked as it is made: the fields of `config.llm.server`."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.client.api_key import check_variable, read_key
from qrag_jax.llm.listener import HOST
from qrag_jax.llm.server.server_arguments import check_arguments
from qrag_jax.runtime.config_fields import internal

MODULE = "vllm.entrypoints.openai.api_server"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Variables of this process that would lead the other interpreter to this environment's packages.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Section `llm.server`: settings of a `Server`; sizes in tokens, times in seconds.

    Attributes:
        name: that clients ask for; "": the folder's or the hub's.
        api_key_env: environment variable with the API key that it shall ask for; "": no key.
        stop_grace: from SIGTERM to SIGKILL. backoff: before the first restart, doubled for each
            further one up to a minute. healthy_after: of service, after which restarts are counted
            anew.

    JAX takes three quarters of its GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says less: on a shared
    GPU that and `memory_share` both count. `publish` opens vLLM's development endpoints, with which
    anyone who reaches the port can stop the server or make it read files, and which no API key
    protects. So not on a machine shared with users who are not trusted.

    Raises:
        InputError: a field cannot be used.
    """

    model: str = ""  # folder of a Hugging Face model, or a hub name
    name: str = internal("")
    python: str = ".venv-vllm/bin/python"  # of vLLM's environment: `make sidecar`
    port: int = 0  # on 127.0.0.1, 0: a free one, kept over restarts
    devices: str = ""  # CUDA_VISIBLE_DEVICES, "0,1"; "": the trainer's
    memory_share: float = 0.45  # of a GPU's memory, weights and cache together
    cpu_cache_gib: int = 0  # of the cache on CPU, 0: as vLLM chooses
    max_model_len: int = 4096  # tokens of prompt and answer, 0: the model's
    dtype: str = "auto"  # of weights and computation
    lora_rank: int = 0  # highest of adapters served, 0: none are
    publish: bool = False  # weights are handed over: opens development endpoints
    # More of vLLM's that do no harm, by whole names: ("--tensor-parallel-size", "2")
    arguments: tuple[str, ...] = ()
    log: str = "vllm.log"  # in the workdir
    api_key_env: str = internal("")
    start_timeout: float = 1800.0  # seconds until it must answer
    stop_grace: float = internal(20.0)
    restarts: int = 5  # in a row, then it is given up
    backoff: float = internal(2.0)
    healthy_after: float = internal(300.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(self.arguments))
        _check_model(self.model)
        if not 0 <= self.port <= 65535:
            raise InputError(f"{_field('port')} is {self.port}; give 1 to 65535, or 0.")
        if not re.fullmatch(r"[\w-]*(,[\w-]+)*", self.devices):
            raise InputError(f"{_field('devices')} is {self.devices!r}; write them as '0,1'.")
        if not 0 < self.memory_share <= 1:
            raise InputError(
                f"{_field('memory_share')} is {self.memory_share}; give a share of the GPU's "
                "memory above 0 and up to 1."
            )
        if self.dtype not in DTYPES:
            raise InputError(f"{_field('dtype')} is {self.dtype!r}; use {', '.join(DTYPES)}.")
        for name in ("cpu_cache_gib", "max_model_len", "lora_rank", "restarts"):
            if (value := getattr(self, name)) < 0:
                raise InputError(f"{_field(name)} is {value}; use 0 or more.")
        for name in ("start_timeout", "stop_grace", "backoff", "healthy_after"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise InputError(f"{_field(name)} is {value}; use seconds above 0.")
        if not self.log:
            raise InputError(f"{_field('log')} is empty; give a file such as vllm.log.")
        check_arguments(self.arguments, self.publish)
        check_variable(self.api_key_env, _field("api_key_env"))

    @classmethod
    def of(cls, fields: Mapping[str, Any], **changes: Any) -> ServerConfig:
        """From `config.llm.server`, with `changes`.

        Raises:
            InputError: a field is unknown or cannot be used.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(fields) - set(known)):
            raise InputError(f"{_field(unknown[0])} is unknown; there are {', '.join(known)}.")
        return cls(**{**fields, **changes})

    @property
    def served_name(self) -> str:
        """The name that clients ask for."""
        return self.name or (Path(self.model).resolve().name if self.is_folder else self.model)

    @property
    def is_folder(self) -> bool:
        """Whether the model lies in a folder of this machine; else the hub has it."""
        return Path(self.model).expanduser().is_dir()

    def api_key(self) -> str:
        """The key from the environment, "" where none is asked for.

        Raises:
            InputError: the variable is not set.
        """
        return read_key(self.api_key_env, _field("api_key_env"))

    def command(self, port: int) -> list[str]:
        """The server's command line, without any secret: every user of the machine can read it."""
        model = str(Path(self.model).expanduser().resolve()) if self.is_folder else self.model
        words = [str(interpreter(self.python)), "-m", MODULE]
        words += ["--host", HOST, "--port", str(port)]
        words += ["--model", model, "--served-model-name", self.served_name]
        words += ["--dtype", self.dtype, "--gpu-memory-utilization", str(self.memory_share)]
        if self.max_model_len:
            words += ["--max-model-len", str(self.max_model_len)]
        if self.lora_rank:
            # Two at once: while one is replaced by the next, questions to both are under way.
            words += ["--enable-lora", "--max-lora-rank", str(self.lora_rank), "--max-loras", "2"]
        return [*words, *self.arguments]

    def environment(self) -> dict[str, str]:
        """The server's environment variables; the API key is among them."""
        own = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONSAFEPATH": "1"}
        own["PYTHONUNBUFFERED"] = "1"
        if self.is_folder:
            own["HF_HUB_OFFLINE"] = "1"  # all there is lies in the folder
        if self.devices:
            own["CUDA_VISIBLE_DEVICES"] = self.devices
        if self.cpu_cache_gib:
            own["VLLM_CPU_KVCACHE_SPACE"] = str(self.cpu_cache_gib)
        # Both are off unless asked for, whatever this process was started with.
        own["VLLM_SERVER_DEV_MODE"] = str(int(self.publish))
        own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = str(int(self.publish))
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in (*_NOT_INHERITED, "VLLM_API_KEY")
        }
        key = {"VLLM_API_KEY": self.api_key()} if self.api_key_env else {}
        return inherited | own | key


def interpreter(python: str) -> Path:
    """The absolute path of an environment's Python, its links not followed: they tell which one.

    Raises:
        InputError: there is none.
    """
    path = Path(os.path.abspath(Path(python).expanduser()))
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise InputError(
            f"{_field('python')}: {python} is not there; make vLLM's environment with "
            "`make sidecar` (GPUs) or `make sidecar-cpu`, or give the Python of one."
        )
    return path


def _field(name: str) -> str:
    return f"config.llm.server.{name}"


def _check_model(model: str) -> None:
    folder = Path(model).expanduser()
    if not model:
        raise InputError(f"{_field('model')} is empty; give a model's folder or its hub name.")
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

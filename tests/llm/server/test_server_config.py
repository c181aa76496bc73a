from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs import common
from qrag_jax.errors import InputError
from qrag_jax.llm.config import LlmConfig
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.server.server_config import ServerConfig
from qrag_jax.runtime.config_fields import fill
from tests.entry_points import ROOT

FILES = (ROOT / "qrag_jax" / "llm").rglob("[a-z]*.py")
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES)


def test_the_room_imports_no_jax() -> None:
    names = ", ".join(MODULES)
    code = f"import sys, {names}; print([n for n in ('jax', 'torch', 'flax') if n in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout == "[]\n"


def test_experiments_have_the_fields_that_are_not_settled_by_the_code() -> None:
    fields = common.get_config("hotpotqa").llm.server.to_dict()
    assert fields["model"] == ""
    kept = {"name", "api_key_env", "stop_grace", "backoff", "healthy_after"}
    assert fields.keys() | kept == {field.name for field in dataclasses.fields(ServerConfig)}
    assert not fields.keys() & kept


def test_names(model_folder: Path) -> None:
    assert ServerConfig(str(model_folder)).served_name == "little"
    assert ServerConfig(f"{model_folder}/.").served_name == "little"
    assert ServerConfig(str(model_folder), name="x").served_name == "x"
    hub = ServerConfig("Qwen/Qwen3-4B")
    assert hub.served_name == "Qwen/Qwen3-4B"
    assert not hub.is_folder
    assert "HF_HUB_OFFLINE" not in hub.environment()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "/no/such"}, r"server.model"),
        ({"model": "FOLDER/.."}, "has no config.json"),
        ({"model": "FOLDER/config.json"}, "no folder .*config.json"),
        ({"port": 70000}, "server.port is 70000"),
        ({"devices": "0;rm"}, r"server.devices"),
        ({"memory_share": 0.0}, "server.memory_share is 0.0"),
        ({"memory_share": 90}, "server.memory_share is 90"),
        ({"dtype": "int4"}, r"server.dtype"),
        ({"max_model_len": -1}, "server.max_model_len is -1"),
        ({"lora_rank": -1}, "server.lora_rank is -1"),
        ({"loaded_adapters": 0}, r"server.loaded_adapters"),
        ({"restarts": -1}, "server.restarts is -1"),
        ({"start_timeout": 0}, "server.start_timeout is 0"),
        ({"log": ""}, "server.log is empty"),
        ({"arguments": (3,)}, r"server.arguments"),
        ({"prot": 1}, r"config.llm.server.prot"),
    ],
)
def test_refused(changes: dict[str, Any], says: str, model_folder: Path) -> None:
    fields: dict[str, Any] = {"model": "FOLDER"} | changes
    fields["model"] = fields["model"].replace("FOLDER", str(model_folder))
    with pytest.raises(InputError, match=says) as caught:
        fill(ServerConfig, fields, "llm.server")
    assert "sk-123" not in str(caught.value)


def test_no_model() -> None:
    with pytest.raises(InputError, match=r"config\.llm\.url"):
        LlmConfig(server=ServerConfig())


def test_the_key_comes_from_the_environment(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(str(model_folder), api_key_env="OUR_KEY")
    monkeypatch.delenv("OUR_KEY", raising=False)
    with pytest.raises(InputError, match="OUR_KEY"):
        config.environment()
    monkeypatch.setenv("OUR_KEY", "abc")
    assert config.environment()["VLLM_API_KEY"] == "abc"
    monkeypatch.setenv("OUR_KEY", "abc\n")  # as read from a file
    assert config.environment()["VLLM_API_KEY"] == "abc"
    monkeypatch.setenv("OUR_KEY", "sk\n123")
    with pytest.raises(InputError, match="OUR_KEY holds characters") as caught:
        config.environment()
    assert "123" not in str(caught.value)
    # Somebody else's key is not handed on.
    monkeypatch.setenv("VLLM_API_KEY", "other")
    assert "VLLM_API_KEY" not in ServerConfig(str(model_folder)).environment()


def test_the_server_gets_no_secret_that_it_does_not_need(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        *("OUR_KEY", "NCBI_API_KEY", "QDRANT_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"),
        *("GH_TOKEN", "Some_Password", "PIP_INDEX_URL", "GOOGLE_APPLICATION_CREDENTIALS"),
    }
    of_the_hub = {"HF_TOKEN", "https_proxy"}
    for name in (*secrets, *of_the_hub):
        monkeypatch.setenv(name, f"the secret of {name}")
    needed = {"HF_HOME": "/models", "CUDA_HOME": "/cuda", "VLLM_LOGGING_LEVEL": "DEBUG"}
    for name, value in needed.items():
        monkeypatch.setenv(name, value)
    config = ServerConfig(str(model_folder), api_key_env="OUR_KEY")
    monkeypatch.setenv("OUR_KEY", "abc")
    given = config.environment()
    assert not given.keys() & {*secrets, *of_the_hub}
    assert given.items() >= {*needed.items(), ("VLLM_API_KEY", "abc"), ("PATH", os.environ["PATH"])}
    of_hub = ServerConfig("org/name", api_key_env="OUR_KEY").environment()
    assert not of_hub.keys() & secrets
    assert of_hub.keys() >= of_the_hub  # gated models


def test_a_header_that_cannot_be_sent_is_not_repeated() -> None:
    reply = Endpoint("http://127.0.0.1:9/v1", "sk-123\n456").get("/v1/models")
    assert reply.status == 0
    assert "sk-123" not in reply.reason

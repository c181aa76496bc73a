"""The sections `llm`: what a server is started with, who is asked, and which values are refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.config import ClientConfig, ServerConfig
from qrag_jax.llm.endpoint import is_local
from qrag_jax.llm.server.server import served_version
from qrag_jax.runtime.whole_files import model_digest


def config(**settings: Any) -> ClientConfig:
    fields = {"url": "http://127.0.0.1:8000/v1", "model": "m", "prefix": "--llm."}
    return ClientConfig(**fields | settings)


def test_urls() -> None:
    for url, meant, local in (
        ("http://localhost:8000", "http://localhost:8000/v1", True),
        ("http://[::1]:8000/v1/", "http://[::1]:8000/v1", True),
        ("https://llm.example.com/api/v2", "https://llm.example.com/api/v2", False),
    ):
        assert (config(url=url).url, is_local(config(url=url).url)) == (meant, local)


def test_refused_fields_of_a_client(model_folder: Path) -> None:
    for field, named, value in (
        *(("url", "url", value) for value in ("127.0.0.1:8000", "http://ho st/", "unix:a/path")),
        *(("url", "api_key_env", f"http://{url}") for url in ("h/v1?key=secret", "u:secret@h/v1")),
        # As a variable could be called, too.
        *(("api_key_env", "api_key_env", key) for key in ("sk-secret", "hf_secretAbC123")),
    ):
        with pytest.raises(InputError, match=f"--llm.{named}") as raised:
            config(**{field: value})
        assert "secret" not in str(raised.value)
    with pytest.raises(InputError, match=r"config\.json"):  # no model
        ServerConfig(str(model_folder.parent))


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", " sk-1\n")
    assert config(api_key_env="SOME_KEY").api_key() == "sk-1"
    for unusable in ("", "schlüssel"):
        monkeypatch.setenv("SOME_KEY", unusable)
        with pytest.raises(InputError, match="SOME_KEY"):
            config(api_key_env="SOME_KEY").api_key()


def test_only_a_model_of_the_hub_gets_the_hubs_token(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other secrets reach no server: see tests/test_planted_keys.py."""
    of_the_hub, secrets = {"HF_TOKEN", "https_proxy"}, {"AWS_SECRET_ACCESS_KEY", "Some_Password"}
    for name in of_the_hub | secrets:
        monkeypatch.setenv(name, f"the secret of {name}")
    env, of_hub = (ServerConfig(m).environment() for m in (str(model_folder), "org/name"))
    assert not env.keys() & (of_the_hub | secrets)
    assert not of_hub.keys() & secrets
    assert of_hub.keys() >= of_the_hub  # gated models
    assert env["PATH"] == os.environ["PATH"]


def test_what_a_server_is_started_with(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.touch(0o755)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    usual = ServerConfig(str(model_folder), python=str(python))
    server = dataclasses.replace(usual, arguments=("--seed", "3"), lora_rank=8, loaded_adapters=3)
    # vLLM takes the last of equal words: none given here can move the server to another address.
    users, _, ours = " ".join(server.command(Path("/own/socket"))).partition("--seed 3 ")
    assert users == f"{python} -m vllm.entrypoints.openai.api_server "
    assert ours.startswith(f"--uds /own/socket --model {model_folder} --served-model-name little ")
    assert "--max-lora-rank 8 --max-loras 3" in ours
    development = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    for config, value in ((server, "0"), (dataclasses.replace(usual, publish=True), "1")):
        env = config.environment()
        assert env.items() >= dict.fromkeys(development, value).items()
        assert env["HF_HUB_OFFLINE"] == "1"
        assert "PYTHONPATH" not in env


def test_every_byte_of_a_model_and_its_servers_settings_make_another_version(
    tmp_path: Path,
) -> None:
    def write(name: str, **files: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for file, content in files.items():
            (folder / f"{file}.safetensors").write_bytes(content)
        (folder / "config.json").write_text("{}")
        return folder

    middle = [write(f"{n}", model=bytes(1 << 20) + bytes([n]) + bytes(1 << 20)) for n in range(3)]
    moved = [write("other/final", a=b"1", b=b"2"), write("else/final", a=b"1", b=b"2")]
    (moved[1] / "README.md").write_text("whatever")
    folders = [*middle, *moved, write("swapped/final", a=b"2", b=b"1")]
    digests = [model_digest(folder, print) for folder in folders]
    assert len({*digests}) == 5
    assert digests[3] == digests[4]
    usual = ServerConfig(str(middle[0]), memory_share=0.9)
    # Of the hub's weights nothing is known here, of what is asked of them something is.
    configs = [usual, ServerConfig(str(middle[1])), ServerConfig("Qwen/Qwen3-4B")]
    configs += [dataclasses.replace(each, arguments=("--revision", "v2")) for each in configs]
    configs.append(dataclasses.replace(usual, dtype="float32"))
    assert len({served_version(each, print) for each in configs}) == 7

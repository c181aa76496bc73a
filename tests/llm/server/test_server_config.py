from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.config import ServerConfig
from qrag_jax.runtime.config_fields import fill
from tests.entry_points import ROOT


def test_the_room_imports_no_jax() -> None:
    files = (ROOT / "qrag_jax" / "llm").rglob("[a-z]*.py")
    parts = (path.relative_to(ROOT).with_suffix("").parts for path in files)
    names = ", ".join(map(".".join, parts))
    code = f"import sys, {names}; print([n for n in ('jax', 'torch', 'flax') if n in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout == "[]\n"


def test_refused(model_folder: Path) -> None:
    wrong = {"devices": "0;rm", "memory_share": 90, "model": "/no/such", "arguments": (3,)}
    for name, value in wrong.items():
        with pytest.raises(InputError, match=f"config.llm.server.{name}"):
            fill(ServerConfig, {"model": str(model_folder), name: value}, "llm.server")
    with pytest.raises(InputError, match=r"has no config\.json"):
        ServerConfig(str(model_folder.parent))


def test_the_key_comes_from_the_environment(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(str(model_folder), api_key_env="OUR_KEY")
    monkeypatch.delenv("OUR_KEY", raising=False)
    with pytest.raises(InputError, match="OUR_KEY"):
        config.environment()
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

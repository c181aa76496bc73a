"""Settings that can be used, and one sentence for each that cannot."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.endpoint import is_local


def config(**settings: Any) -> ClientConfig:
    given = {"url": "http://127.0.0.1:8000/v1", "model": "m", "prefix": "--llm."}
    return ClientConfig(**given | settings)


@pytest.mark.parametrize(
    ("url", "meant", "local"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", True),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1", True),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1", True),
        ("https://llm.example.com/api/v2", "https://llm.example.com/api/v2", False),
    ],
)
def test_urls(url: str, meant: str, local: bool) -> None:
    assert (config(url=url).url, is_local(config(url=url).url)) == (meant, local)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"url": "127.0.0.1:8000"}, "--llm.url"),
        ({"url": "http://host:port/v1"}, "--llm.url"),
        ({"url": "http://ho st/v1"}, "--llm.url"),
        ({"url": "http://host/v1?key=3"}, "--llm.api_key_env"),
        ({"model": ""}, "--llm.model"),
        ({"concurrency": 0}, "--llm.concurrency"),
        ({"deadline": float("nan")}, "--llm.deadline"),
        ({"wait_limit": -1}, "--llm.wait_limit"),
        ({"api_key_env": "sk-abc"}, "--llm.api_key_env"),
    ],
)
def test_what_cannot_be_used(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        config(**settings)


def test_secrets_are_not_repeated() -> None:
    for settings in (
        {"url": "http://user:secret@host/v1"},
        {"api_key_env": "sk-secret"},
        {"api_key_env": "hf_secretAbC123"},  # as a variable could be called
        {"api_key_env": "secret0123"},
    ):
        with pytest.raises(InputError) as raised:
            config(**settings)
        assert "secret" not in str(raised.value)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config().api_key() == ""
    monkeypatch.setenv("SOME_KEY", " sk-1\n")
    assert config(api_key_env="SOME_KEY").api_key() == "sk-1"
    assert "sk-1" not in repr(config(api_key_env="SOME_KEY"))
    for unusable in ("", "schlüssel"):
        monkeypatch.setenv("SOME_KEY", unusable)
        with pytest.raises(InputError, match="SOME_KEY"):
            config(api_key_env="SOME_KEY").api_key()

"""Settings that cannot be used are refused, with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.remote_engines.config import RemoteEngineConfig
from qrag_jax.runtime.config_fields import comments, fields_of


def test_every_field_is_described() -> None:
    told = comments(RemoteEngineConfig)
    assert all(told.get(field.name) for field in fields_of(RemoteEngineConfig))


def test_a_url_loses_its_last_slash() -> None:
    assert RemoteEngineConfig(url="https://a.invalid/api/").url == "https://a.invalid/api"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("service", "google"),
        ("sort", "date"),
        ("url", "ftp://a.invalid"),
        ("url", "file:///etc/passwd"),
        ("url", "a.invalid"),
        ("url", "https://a.invalid/?api_key=secret-key-here"),
        ("url", "https://me:secret-key-here@a.invalid"),
        ("requests_per_second", -1.0),
        ("requests_per_second", float("nan")),
        ("at_once", 0),
        ("most", 0),
        ("most", 10_000),
        ("first_year", 70),
        ("first_year", 10_000),
        ("timeout", 0.0),
        ("timeout", float("nan")),
        ("attempts", 0),
        ("pause", -1.0),
        ("longest_wait", -1.0),
        ("patience", float("nan")),
        ("tool", "our tool"),
        ("email", "a@b.c\r\nHost: x"),
    ],
)
def test_a_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^config.engine.{field} ") as told:
        RemoteEngineConfig(**{field: value})
    assert "secret-key-here" not in str(told.value)


def test_trials_have_a_limit_of_their_own() -> None:
    assert RemoteEngineConfig(service="clinical_trials", most=10_000).most == 10_000

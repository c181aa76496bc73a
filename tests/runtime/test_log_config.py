"""Section `log`: where metrics go, what is refused before anything is computed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import trackers
from qrag_jax.runtime.config_fields import fill
from qrag_jax.runtime.train_config import KNOWN, LogConfig


@pytest.mark.parametrize(
    ("given", "to"),
    [
        (("wandb", "mlflow"), ("wandb", "mlflow")),
        (("tensorboard,wandb, trackio",), ("tensorboard", "wandb", "trackio")),
        ("mlflow", ("mlflow",)),
        ((), ()),
        ("", ()),
    ],
)
def test_names_as_command_lines_give_them(given: object, to: tuple[str, ...]) -> None:
    assert fill(LogConfig, {"to": given}, "log").to == to


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"to": ("wandbb",)}, "config.log.to has 'wandbb'; use some of tensorboard, wandb"),
        ({"to": (3,)}, "config.log.to has '3'; use some of"),
        ({"to": ("wandb", "wandb")}, "name each only once"),
        ({"project": "a/b"}, "config.log.project is 'a/b'; use 1 to 100 letters"),
        ({"project": ""}, "config.log.project is ''"),
        ({"name": "x" * 101}, "config.log.name is"),
        ({"name": "a\nb"}, "at most 100 printable characters"),
        ({"where": "x"}, "config.log.where is unknown"),
    ],
)
def test_what_is_refused(fields: dict, told: str) -> None:
    with pytest.raises(InputError, match="log") as error:
        fill(LogConfig, fields, "log")
    assert told in str(error.value)


@pytest.mark.parametrize("name", KNOWN[1:])
def test_a_library_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else found(n))
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(InputError, match="which is not installed") as error:
        trackers.check_usable(LogConfig(to=("tensorboard", name)))
    assert f"run pip install 'qrag_jax[{name}]'" in str(error.value)


def test_wandb_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    log = LogConfig(to=("wandb",))
    with pytest.raises(InputError, match="there is no key for it: set the environment variable"):
        trackers.check_usable(log)
    file.write_text("machine api.wandb.ai login user password abc\n")
    file.chmod(0o600)
    trackers.check_usable(log)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    with pytest.raises(InputError, match="no key"):
        trackers.check_usable(log)
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers.check_usable(log)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    trackers.check_usable(log)

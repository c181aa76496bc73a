"""Section `log`: where metrics go, what is refused before anything is computed."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import trackers
from qrag_jax.runtime.config_fields import fill
from qrag_jax.runtime.train_config import LogConfig


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
    "fields",
    [
        {"to": ("wandbb",)},
        {"to": (3,)},
        {"to": ("wandb", "wandb")},
        {"project": "a/b"},
        {"project": ""},
        {"name": "x" * 101},
        {"name": "a\nb"},
    ],
)
def test_what_is_refused(fields: dict) -> None:
    with pytest.raises(InputError, match=rf"config\.log\.{next(iter(fields))} "):
        fill(LogConfig, fields, "log")


def test_a_library_that_is_not_installed_or_is_a_folder_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for spec in (None, ModuleSpec("wandb", None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(InputError, match=r"pip install 'qrag_jax\[wandb\]'"):
            trackers.check_usable(LogConfig(to=("tensorboard", "wandb")))


def test_wandb_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    log = LogConfig(to=("wandb",))
    for content in (None, "machine\n"):  # a broken netrc is none
        if content is not None:
            file.write_text(content)
        with pytest.raises(InputError, match="there is no key"):
            trackers.check_usable(log)
    file.write_text("machine api.wandb.ai login user password abc\n")
    file.chmod(0o600)
    trackers.check_usable(log)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    with pytest.raises(InputError, match="no key"):
        trackers.check_usable(log)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "x")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            trackers.check_usable(log)

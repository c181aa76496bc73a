"""The section `env`: what it refuses, and runs that were saved without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from configs.rlvr import get_config
from qrag_jax.errors import InputError
from qrag_jax.systems.environment_config import EnvironmentConfig
from qrag_jax.systems.rlvr_config import RlvrConfig


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"arguments": "{"}, "no JSON object"),
        ({"arguments": "[1]"}, "no JSON object"),
        ({"renderer": "qwen3"}, "no JSON object"),
        ({"max_turns": 0}, "config.env.max_turns is 0"),
        ({"side_by_side": 0}, "config.env.side_by_side is 0"),
    ],
)
def test_a_field_that_cannot_be_used_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        EnvironmentConfig(**fields)


def config(**changes: Any) -> Any:
    found = get_config("verifiers").unlock()
    found.env.verifiers = "made"
    found.update_from_flattened_dict(changes)
    return found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": ("sft", "grpo")}, "set stages to grpo"),
        ({"tools.form": "xml"}, "whose calls are JSON"),
        ({"rubric.path": "own.py:score"}, "has its own rubric"),
        ({"rubric.differ_by": "em"}, "has its own rubric"),
    ],
)
def test_what_an_environment_cannot_do_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        RlvrConfig.of(config(**changes))


def test_a_python_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"pip install .*verifiers"):
        EnvironmentConfig().interpreter()
    made = tmp_path / ".venv-verifiers" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.symlink_to(sys.executable)
    assert EnvironmentConfig().interpreter() == str(made)
    assert EnvironmentConfig(python="other").interpreter() == str(tmp_path / "other")

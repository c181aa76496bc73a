"""Section `env`: an environment of the package `verifiers`, in the place of questions and tools."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError, check_least

MADE = ".venv-verifiers"  # is looked for in the working folder; `make verifiers`


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """Section `env`."""

    # Id of an installed environment; then config.questions, tasks and rubric are not read, and the
    # reward is its own. "": the questions and tools of the other sections
    verifiers: str = ""
    # The Python that has verifiers and the environment, which runs as it is, without a sandbox.
    # "": that of .venv-verifiers in this folder
    python: str = ""
    arguments: str = "{}"  # of the environment, or of its taskset, as a JSON object
    max_turns: int = 16  # of the model in an episode; a further one is refused, and it is truncated
    max_tokens: int = 0  # sampled in an episode, likewise; 0: as many as there is room for
    seconds: float = 120.0  # that it may work on an episode, without the model's time; 0: no limit
    side_by_side: int = 64  # episodes that are played at a time
    tasks: int = 0  # only so many of its first tasks; 0: all, of an endless taskset 1000
    # What talks with the model: direct (ours, in the environment's process), own (of the
    # taskset's package, else bash), or the id of another harness, such as null
    harness: str = "direct"
    # What makes messages to ids: "" (ours), or a renderer's settings as a JSON
    # object, such as {"name": "qwen3"}
    renderer: str = ""

    def __post_init__(self) -> None:
        check_least("env", self, max_turns=1, max_tokens=0, seconds=0.0, side_by_side=1, tasks=0)
        self.given()
        self.renders()

    def given(self) -> dict[str, Any]:
        """The arguments."""
        return _object(self.arguments, "arguments")

    def renders(self) -> dict[str, Any] | None:
        """The settings of a renderer; None: ours."""
        return _object(self.renderer, "renderer") if self.renderer else None

    def interpreter(self) -> str:
        """The Python that has verifiers."""
        if self.python:
            return str(Path(self.python).expanduser().absolute())
        made = Path(MADE).absolute() / "bin" / "python"
        if os.access(made, os.X_OK):
            return str(made)
        if _has_verifiers():
            return sys.executable
        raise InputError(
            f"config.env.python is empty, and there is no {MADE} here; pip install "
            "'qrag_jax[verifiers]' into an environment of its own, and name the Python of that."
        )


def _has_verifiers() -> bool:
    from importlib.util import find_spec

    return find_spec("verifiers") is not None


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(
            f"config.env.{name} is {text!r:.80}, which is no JSON object; write one, such as "
            '{"name": "value"}.'
        )
    return found

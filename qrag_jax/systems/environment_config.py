"""Section `env`: an environment of the package `verifiers`, in the place of questions and tools."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError, check_known, check_least

V0, V1 = PROTOCOLS = ("v0", "v1")
# Pythons that are looked for in the working folder.
MADE = {V0: ".venv-verifiers0", V1: ".venv-verifiers1"}


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """Section `env`.

    Raises:
        InputError: a field cannot be used.
    """

    # Id of an installed environment; then config.questions, tasks and rubric are not read, and the
    # reward is its own. "": the questions and tools of the other sections
    verifiers: str = ""
    # What it speaks: v0 (verifiers below 0.4), v1 (0.4); "": what the verifiers of `python` speaks
    protocol: str = ""
    # The Python that has verifiers and the environment, which runs as it is, without a sandbox.
    # "": that of .venv-verifiers0 or .venv-verifiers1 in this folder
    python: str = ""
    arguments: str = "{}"  # of the environment, or of its taskset, as a JSON object
    max_turns: int = 16  # of the model in an episode; a further one is refused, and it is truncated
    max_tokens: int = 0  # sampled in an episode, likewise; 0: as many as there is room for
    seconds: float = 120.0  # that it may work on an episode, without the model's time; 0: no limit
    side_by_side: int = 64  # episodes that are played at a time
    tasks: int = 0  # only so many of its first tasks; 0: all, of an endless taskset 1000
    # Of v1, what talks with the model: direct (ours, in the environment's process), own (of the
    # taskset's package, else bash), or the id of another harness, such as null
    harness: str = "direct"
    # Of v1, what makes messages to ids: "" (ours, as for v0), or a renderer's settings as a JSON
    # object, such as {"name": "qwen3"}
    renderer: str = ""

    def __post_init__(self) -> None:
        check_least("env", self, max_turns=1, max_tokens=0, seconds=0.0, side_by_side=1, tasks=0)
        if self.protocol:
            check_known("env", self, "protocol", PROTOCOLS)
        self.given()
        self.renders()

    def given(self) -> dict[str, Any]:
        """The arguments.

        Raises:
            InputError: they are no JSON object.
        """
        return _object(self.arguments, "arguments")

    def renders(self) -> dict[str, Any] | None:
        """The settings of a renderer; None: ours.

        Raises:
            InputError: they are no JSON object.
        """
        return _object(self.renderer, "renderer") if self.renderer else None

    def interpreter(self) -> str:
        """The Python that has verifiers.

        Raises:
            InputError: none is named, and none of those that `make` writes is there.
        """
        if self.python:
            return str(Path(self.python).expanduser().absolute())
        wanted = [self.protocol] if self.protocol else [*PROTOCOLS]
        for protocol in wanted:
            made = Path(MADE[protocol]).absolute() / "bin" / "python"
            if os.access(made, os.X_OK):
                return str(made)
        if _has_verifiers():
            return sys.executable
        extras = " or ".join(f"'qrag_jax[verifiers{protocol[1:]}]'" for protocol in wanted)
        raise InputError(
            "config.env.python is empty, and there is no "
            f"{' nor '.join(MADE[protocol] for protocol in wanted)} here; pip install {extras} "
            "into an environment of its own, and name the Python of that."
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

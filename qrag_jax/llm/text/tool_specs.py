"""What a tool of a language model is: its name, its parameters and their kinds."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

# Kind of a parameter → its JSON schema, and its name in sentences.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "string": ({"type": "string"}, "a text"),
    "integer": ({"type": "integer"}, "an integer"),
    "strings": ({"type": "array", "items": {"type": "string"}}, "a list of texts"),
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool.

    Attributes:
        name: letters, digits and underscores.
        kind: "string", "integer" or "strings".
        about: what the model is told about it.
        required: whether each call must give it.
        least: the lowest integer allowed; None: any.

    Raises:
        ValueError: the name or the kind cannot be used, or `least` is not for an integer.
    """

    name: str
    kind: str
    about: str
    required: bool = True
    least: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.kind not in KINDS:
            raise ValueError(f"the kind {self.kind!r} is none of {', '.join(KINDS)}.")
        if self.least is not None and self.kind != "integer":
            raise ValueError(f"the parameter {self.name} has a least value and is no integer.")

    @property
    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        least = {} if self.least is None else {"minimum": self.least}
        return {**KINDS[self.kind][0], "description": self.about, **least}


@dataclasses.dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call; `about` is what the model is told about it.

    Raises:
        ValueError: the name cannot be used, or two parameters have one name.
    """

    name: str
    about: str
    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        _check_name(self.name)
        if len({parameter.name for parameter in self.parameters}) < len(self.parameters):
            raise ValueError(f"two parameters of the tool {self.name} have one name.")

    @property
    def schema(self) -> dict[str, Any]:
        """The function tool as OpenAI's chat endpoint and chat templates take it."""
        parameters = {
            "type": "object",
            "properties": {parameter.name: parameter.schema for parameter in self.parameters},
            "required": [parameter.name for parameter in self.parameters if parameter.required],
        }
        function = {"name": self.name, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": function}


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} is not made of letters, digits and underscores.")

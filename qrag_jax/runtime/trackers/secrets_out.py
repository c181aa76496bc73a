"""Takes keys out of texts that leave the process: messages of libraries, addresses in a config."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_NAMES = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)S?", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=//)[^/@\s]+@")  # user:password@
_SHORTEST = 8  # characters; a shorter value may be an everyday word


def without_secrets(text: str) -> str:
    """The text without values of environment variables for keys, and without user:password@."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _NAMES.fullmatch(name):
            text = text.replace(value, f"${name}")
    return _IN_ADDRESS.sub("", text)


def clean(fields: Any) -> Any:
    """The same fields, in nested sections and lists, with such texts alone."""
    if isinstance(fields, Mapping):
        return {name: clean(value) for name, value in fields.items()}
    if isinstance(fields, list | tuple):
        return [clean(value) for value in fields]
    return without_secrets(fields) if isinstance(fields, str) else fields

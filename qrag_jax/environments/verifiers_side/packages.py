"""Finds the package of an environment, and which protocol its source is written for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from .wire import Refused, told

_SIGNS = {"v0": "def load_environment", "v1": "Taskset"}
_PYTHON = {"v0": "verifiers below 0.4", "v1": "verifiers 0.4"}


def code_of(module: ModuleType) -> str:
    """A digest of the Python files of a module or of its package."""
    digest, path = hashlib.sha256(), Path(module.__file__ or "")
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path.parent)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def imported(name: str, module: str, protocol: str) -> ModuleType:
    """The module of an environment.

    Args:
        name: as the user gave it.
        module: to import.
        protocol: which one is spoken here.

    Raises:
        Refused: it is not installed, cannot be imported, or is written for the other protocol.
    """
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise Refused(
            f"config.env.verifiers is {name!r}, and the Python of config.env.python has no package "
            f"{module}; install it there"
        )
    other = "v1" if protocol == "v0" else "v0"
    source = _source(spec.origin)
    if _SIGNS[other] in source and _SIGNS[protocol] not in source:
        raise Refused(
            f"the package {module} speaks {other}, and the verifiers of config.env.python speaks "
            f"{protocol}; name a Python that has {_PYTHON[other]}"
        )
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Refused(
            f"the package {module} cannot be imported ({told(error)}); install what it needs, or "
            "mend it"
        ) from error


def _source(origin: str | None) -> str:
    """The text of a module, or of all modules of its package."""
    if origin is None or not origin.endswith(".py"):
        return ""
    path = Path(origin)
    files = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
    return "\n".join(file.read_text("utf-8", "replace") for file in files)

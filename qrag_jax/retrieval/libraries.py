"""The optional libraries of engines, imported when an engine first needs them."""

from __future__ import annotations

import importlib
from typing import Any

from qrag_jax.errors import InputError


def engine_library(module: str, package: str, extra: str) -> Any:
    """A module.

    Args:
        package: that it is installed with, as in `pip install package`.
        extra: ours that asks for this package; also the engine's name.

    Raises:
        InputError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"files and indexes of {extra} need the package {package}: run pip install "
            f"'qrag_jax[{extra}]', or use the engine exact."
        ) from None

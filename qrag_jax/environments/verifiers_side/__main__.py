"""Starts the program by its path, in a Python that need not have qrag_jax: python verifiers_side"""

import importlib
import sys
import types
from pathlib import Path

_NAME = "qrag_verifiers_side"  # no package that an environment brings is called so


def _start() -> int:
    here = Path(__file__).resolve().parent
    # This folder's modules have common names; an environment's own imports must not find them.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    sys.modules[_NAME] = package = types.ModuleType(_NAME)
    package.__path__ = [str(here)]
    return importlib.import_module(f"{_NAME}.program").main()


if __name__ == "__main__":
    sys.exit(_start())

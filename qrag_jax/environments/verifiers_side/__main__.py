"""Starts the program by its path, in a Python that need not have qrag_jax: python verifiers_side"""

import importlib
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    # This folder's modules have common names; an environment's own imports must not find them.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    # No package that an environment brings is called so.
    sys.modules["qrag_verifiers_side"] = package = types.ModuleType("qrag_verifiers_side")
    package.__path__ = [str(here)]
    sys.exit(importlib.import_module("qrag_verifiers_side.program").main())

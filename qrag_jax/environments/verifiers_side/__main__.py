"""Starts the program by its path, in a Python that need not have qrag_jax: python verifiers_side"""

import importlib
import importlib.util
import sys
from pathlib import Path

_NAME = "qrag_verifiers_side"  # no package that an environment brings is called so


def _start() -> int:
    here = Path(__file__).resolve().parent
    # This folder's modules have common names; an environment's own imports must not find them.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.util.spec_from_file_location(
        _NAME, here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_NAME] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module(f"{_NAME}.program").main()


if __name__ == "__main__":
    sys.exit(_start())

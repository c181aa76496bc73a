"""Where experiment files are found: in the working folder, else among those of the package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = ("config", "eval_config")  # whose values name such files
FOLDER = "configs"


def own_folder() -> Path:
    """The experiment files of this version: in an installed package, or beside the checkout's."""
    installed = PACKAGE / FOLDER
    return installed if installed.is_dir() else PACKAGE.parent / FOLDER


def resolved(argv: Sequence[str]) -> list[str]:
    """The command line, with the package's own file where `configs/NAME.py` is not in the working
    folder. Files may `from configs import common`, wherever they lie: that is the package's."""
    words = list(argv)
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in FLAGS:
            continue
        if equals:
            words[place] = f"--{name}={_found(value)}"
        elif place + 1 < len(words):
            words[place + 1] = _found(words[place + 1])
    _import_own()
    return words


def _found(value: str) -> str:
    path, colon, variant = value.partition(":")
    own = own_folder() / Path(path).name
    if Path(path).exists() or Path(path).parent != Path(FOLDER) or not own.exists():
        return value
    return f"{own}{colon}{variant}"


def _import_own() -> None:
    """Lets `configs` be the package's own folder where nothing else of that name is installed."""
    if FOLDER in sys.modules:
        return
    found = importlib.util.find_spec(FOLDER)
    places = list(found.submodule_search_locations or ()) if found else []
    if any((Path(place) / "common.py").exists() for place in places):
        return
    spec = importlib.util.spec_from_loader(FOLDER, loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(own_folder())]
    sys.modules[FOLDER] = importlib.util.module_from_spec(spec)

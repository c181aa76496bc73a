"""Finds experiment files: in the working folder, else in the package."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = ("config", "eval_config")  # flags whose values name experiment files
FOLDER = "configs"


def own_folder() -> Path:
    """The folder of this version's experiment files: in an installed package, or in a checkout."""
    installed = PACKAGE / FOLDER
    return installed if installed.is_dir() else PACKAGE.parent / FOLDER


def resolved(argv: Sequence[str]) -> list[str]:
    """Returns the command line, with missing experiment files replaced by the package's own.

    Only `configs/NAME.py` is replaced, if it is not in the working folder and the package has it.
    After the call, an experiment file in any folder can use `from configs import common`.
    """
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


def instead(path: str) -> str:
    """What to do about an experiment file that is not there: which ones the package has."""
    names = sorted(each.stem for each in own_folder().glob("[!_]*.py") if "common" not in each.stem)
    if like := difflib.get_close_matches(Path(path).stem, names, n=1):
        return f"did you mean {FOLDER}/{like[0]}.py?"
    return f"use one of {', '.join(f'{FOLDER}/{name}.py' for name in names)}."


def _found(value: str) -> str:
    path, colon, variant = value.partition(":")
    own = own_folder() / Path(path).name
    if Path(path).exists() or Path(path).parent != Path(FOLDER) or not own.exists():
        return value
    return f"{own}{colon}{variant}"


def _import_own() -> None:
    """Makes `configs` the package's own folder, unless another one with `common.py` is found."""
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

"""Finds experiment files and examples: in the working folder, else in the package."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = ("config", "eval_config")  # flags whose values name experiment files
FOLDER, EXAMPLES = "configs", "examples"
# Something that tells ours from another program's folder of this name.
_MARKS = {FOLDER: "common.py", EXAMPLES: "worlds"}


def own_folder(name: str = FOLDER) -> Path:
    """The folder of this version's experiment files: in an installed package, or in a checkout."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def example(path: str) -> Path:
    """A file of code that a user names; one of `examples/` that is not there is the package's.

    After the call, this file can use `from examples.worlds import world`.
    """
    file = Path(path).expanduser()
    if not file.exists() and file.parts[:1] == (EXAMPLES,):
        file = own_folder(EXAMPLES).joinpath(*file.parts[1:])
    _import_own()
    return file.absolute()


def resolved(argv: Sequence[str]) -> list[str]:
    """The command line, with each missing `configs/NAME.py` replaced by the package's own.

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
    """Makes `configs` and `examples` the package's own folders, unless ours are found already."""
    for name, mark in _MARKS.items():
        if name in sys.modules:
            continue
        found = importlib.util.find_spec(name)
        places = list(found.submodule_search_locations or ()) if found else []
        if any((Path(place) / mark).exists() for place in places):
            continue
        spec = importlib.util.spec_from_loader(name, loader=None, is_package=True)
        assert spec is not None
        spec.submodule_search_locations = [str(own_folder(name))]
        sys.modules[name] = importlib.util.module_from_spec(spec)

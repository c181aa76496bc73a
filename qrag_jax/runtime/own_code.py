"""Files of code that a user names: experiments, examples, and functions as FILE:FUNCTION.

An experiment or example that is not in the working folder is the package's own. A file runs as it
is, with all rights of the run: there is no sandbox. It is run only where the command line or a
config names it; data, models and logs never do.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from qrag_jax.errors import InputError

PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = ("config", "eval_config")  # flags whose values name experiment files
FOLDER, EXAMPLES = "configs", "examples"
# Something that tells ours from another program's folder of this name.
_MARKS = {FOLDER: "common.py", EXAMPLES: "worlds"}
SUFFIX = ".py"


def own_folder(name: str = FOLDER) -> Path:
    """The folder of this version's experiment files: in an installed package, or in a checkout."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def example(path: str) -> Path:
    """A file of code that a user names; one of `examples/` that is not there is the package's.

    After the call, this file can use `from examples.worlds import world`.
    """
    _import_own()
    return (_packaged(path, EXAMPLES) or Path(path).expanduser()).absolute()


def resolved(argv: Sequence[str]) -> list[str]:
    """The command line, with missing `configs/NAME.py` and `examples/NAME.py` the package's own.

    After the call, an experiment file in any folder can use `from configs import common`.
    """
    words = list(argv)
    for place, value in flag_values(argv, *FLAGS):
        path = value.partition(":")[0]
        if packaged := _packaged(path, FOLDER) or _packaged(path, EXAMPLES):
            words[place] = words[place].replace(path, str(packaged), 1)
    _import_own()
    return words


def flag_values(argv: Sequence[str], *names: str) -> Iterator[tuple[int, str]]:
    """The values of `--name=value` and `--name value`, with the places of the words they are in."""
    for place, word in enumerate(argv):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in names:
            if equals:
                yield place, value
            else:
                yield from enumerate(argv[place + 1 : place + 2], place + 1)


def instead(path: str) -> str:
    """What to do about an experiment file that is not there: which ones the package has."""
    names = sorted(file.stem for file in own_folder().glob("[!_]*.py") if "common" not in file.stem)
    if like := difflib.get_close_matches(Path(path).stem, names, n=1):
        return f"did you mean {FOLDER}/{like[0]}.py?"
    return f"use one of {', '.join(f'{FOLDER}/{name}.py' for name in names)}."


def _packaged(path: str, folder: str) -> Path | None:
    """The package's own file of this path, if it begins with `folder` and there is none here."""
    local = Path(path).expanduser()
    file = own_folder(folder).joinpath(*local.parts[1:])
    return file if local.parts[:1] == (folder,) and not local.exists() and file.is_file() else None


def _import_own() -> None:
    """Makes `configs` and `examples` the package's own folders, unless ours are found already."""
    for name, mark in _MARKS.items():
        package = None if name in sys.modules else importlib.util.find_spec(name)
        places = (package and package.submodule_search_locations) or ()
        if name in sys.modules or any((Path(place) / mark).exists() for place in places):
            continue
        spec = importlib.util.spec_from_loader(name, loader=None, is_package=True)
        assert spec is not None
        spec.submodule_search_locations = [str(own_folder(name))]
        sys.modules[name] = importlib.util.module_from_spec(spec)


# ---------------------------------------------------------------------- functions


@dataclasses.dataclass(frozen=True)
class OwnCode:
    spec: str  # FILE:FUNCTION
    function: Callable[..., Any]
    digest: str  # of the file's content


def is_own_code(path: str) -> bool:
    """Whether a path has the form FILE.py:FUNCTION."""
    file, colon, name = path.rpartition(":")
    return bool(colon) and file.endswith(SUFFIX) and name.isidentifier()


def names_foreign(paths: str) -> bool:
    """Whether a path, or one of name=path,name=path, is code that the package did not bring."""
    specs = [part.rpartition("=")[2].strip() for part in paths.split(",")]
    files = [spec.rpartition(":")[0] if is_own_code(spec) else spec for spec in specs]
    files = [file for file in files if file.endswith(SUFFIX)]
    folder = own_folder(EXAMPLES).resolve()
    return not all(example(file).resolve().is_relative_to(folder) for file in files)


def check_form(spec: str, field: str) -> None:
    """Refuses a text that names no file and function."""
    if not is_own_code(spec):
        raise InputError(f"{field} is {spec!r}; write FILE.py:FUNCTION, such as my_code.py:score.")


def load(spec: str, field: str, takes: Sequence[str]) -> OwnCode:
    """Runs the file, and returns its function.

    Args:
        field: the config's field that names it, for errors.
        takes: names of the arguments that the function will be called with.
    """
    check_form(spec, field)
    file, _, name = spec.rpartition(":")
    module, path = run_file(file, field), example(file)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise InputError(f"{field} is {spec}: no function {name} in {path}; but {there or 'none'}.")
    try:
        inspect.signature(function).bind(**dict.fromkeys(takes))
    except (TypeError, ValueError):
        raise InputError(
            f"{field} is {spec}, but {name} lacks arguments of the names {', '.join(takes)}."
        ) from None
    return OwnCode(spec, function, hashlib.sha256(path.read_bytes()).hexdigest()[:16])


def run_file(file: str, field: str) -> ModuleType:
    path = example(file)
    if not path.is_file():
        raise InputError(f"{field} is {file}, but there is no file {path}; give its path.")
    name = f"qrag_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{field} is {file}: {path} does not run ({reason_of(error)}).") from error
    return module


def reason_of(error: BaseException) -> str:
    """What a user's code raised, in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__

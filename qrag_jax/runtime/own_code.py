"""Loads a function from a Python file that a user names as FILE:FUNCTION.

The file runs as it is, with all rights of the run: there is no sandbox. It is run only where the
command line or a config names it; data, models and logs never do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime import config_files

SUFFIX = ".py"


@dataclasses.dataclass(frozen=True)
class OwnCode:
    """A user's function."""

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
    own = config_files.own_folder(config_files.EXAMPLES).resolve()
    files = [each.rpartition(":")[0] for each in specs if is_own_code(each)]
    return not all(config_files.example(file).resolve().is_relative_to(own) for file in files)


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
    module = run_file(file, field)
    path = config_files.example(file)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise InputError(
            f"{field} is {spec}, but {path} has no function {name}; it has {there or 'none'}."
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(takes))
    except (TypeError, ValueError):
        raise InputError(
            f"{field} is {spec}, but {name} cannot be called with {', '.join(takes)}; give it "
            "these arguments, by these names."
        ) from None
    return OwnCode(spec, function, hashlib.sha256(path.read_bytes()).hexdigest()[:16])


def run_file(file: str, field: str) -> ModuleType:
    """Runs a file as a module of its own name."""
    path = config_files.example(file)
    if not path.is_file():
        raise InputError(f"{field} is {file}, but there is no file {path}; give its path.")
    module_name = f"qrag_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # dataclasses look their module up there
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise InputError(
            f"{field} is {file}, but {path} cannot be run ({told(error)}); mend it."
        ) from error
    return module


def told(error: BaseException) -> str:
    """What a user's code raised, in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__

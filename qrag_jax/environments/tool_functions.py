"""Functions of a user's file as tools of a language model, each call in a process of its own.

The process runs the file, and calls one function at a time. A call that takes too long, or that
ends the process, costs that call alone: the process is started again for the next one. Whatever a
call does, the model gets a text, which depends on nothing but the file and the arguments, so that
a resumed run reads the same.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import queue
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from qrag_jax.errors import InputError
from qrag_jax.runtime import own_code
from qrag_jax.runtime.bounded_json import BadJSONError, typed
from qrag_jax.runtime.line_process import LineProcess, ProcessLost

PATH = "config.tools.path"
# What became of a call: it gave a result; its arguments were not the function's; or it raised, took
# too long, or ended the process.
DONE, MALFORMED, FAILED = "done", "malformed", "failed"


class Called(NamedTuple):
    text: str  # what the model reads
    outcome: str = DONE  # or `MALFORMED` or `FAILED`


class ToolFunctions:
    """The functions of a file, which may be called from several threads.

    Args:
        log: takes what they print.
        seconds: that a call may take.
        most: characters of a result; the rest is cut off.
    """

    def __init__(self, path: str, log: Path, *, seconds: float, most: int) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        # With the paths for imports that the trainer has, as `multiprocessing` does it.
        start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
        fields = {"path": path, "most": most}
        self._process = LineProcess((sys.executable, "-c", start), log, fields, path)
        opened = self._start(described=True)
        self.schemas: tuple[dict[str, Any], ...] = tuple(opened["schemas"])
        self.digest: str = opened["digest"]  # of the file's content
        self.end()  # the first call starts it again

    def call(self, name: str, arguments: Mapping[str, Any]) -> Called:
        """The result of a call, or what kept it from giving one."""
        with self._lock:
            process = self._process
            if self._start()["digest"] != self.digest:
                raise InputError(f"{PATH} {process.fields['path']} has changed; start again.")
            process.say("call", name=name, arguments=arguments)
            message, lost = None, "ended without a result"
            try:
                message = process.messages.get(timeout=self._seconds)
            except queue.Empty:
                lost = f"gave no result within {self._seconds:g} seconds, and was stopped"
            if message is None:
                process.end()
                return Called(f"The tool {name} {lost}.", FAILED)
            return Called(message["text"], message["outcome"])

    def end(self) -> None:
        with self._lock:
            self._process.end()

    def _start(self, *, described: bool = False) -> Any:
        self._process.fields = {**self._process.fields, "described": described}
        try:
            return self._process.start()
        except ProcessLost as lost:
            raise InputError(f"{PATH}: {lost}; mend the file.") from None


# ---------------------------------------------------------------- in the process


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions that a module itself defines, but for those whose names begin with _."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def schema_of(name: str, function: Callable[..., Any], path: str) -> dict[str, Any]:
    """What a chat template shows of a function, by its docstring and its annotations."""
    from transformers.utils import get_json_schema  # which may import torch

    try:
        return get_json_schema(function)
    except Exception as error:  # of several kinds, of which not all are public
        raise InputError(
            f"{PATH} is {path}, but its function {name} cannot be a tool "
            f"({own_code.reason_of(error)}); give it an annotation of each argument, and a "
            'docstring with "Args:" that says what each is, or begin its name with _.'
        ) from None


def answer(
    functions: Mapping[str, Callable[..., Any]], name: str, arguments: Mapping[str, Any], most: int
) -> Called:
    function = functions[name]
    try:
        inspect.signature(function).bind(**arguments)
        kinds = typing.get_type_hints(function, include_extras=True)
        typed_arguments = {key: typed(kinds[key], value, key) for key, value in arguments.items()}
    except (TypeError, BadJSONError) as error:
        return Called(f"The call of {name} cannot be carried out: {error}."[:most], MALFORMED)
    try:
        result = function(**typed_arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except BaseException as error:  # also of a function that ends the program
        return Called(f"The tool {name} failed: {own_code.reason_of(error)}"[:most], FAILED)
    if len(text) > most:
        text = f"{text[:most]}… (cut off: the result has {len(text)} characters)"
    return Called(text)


def main() -> None:
    """Calls what the trainer asks for, until that ends."""
    from qrag_jax.environments.verifiers_side.program import Link  # of no use to the trainer

    link = Link()
    asked = link.read()
    if asked is None:
        return
    path = asked["path"]
    try:
        functions = functions_of(own_code.run_file(path, PATH))
        if not functions:
            raise InputError(f"{PATH} is {path}, but that defines no function; write one.")
        described = functions.items() if asked["described"] else ()
        schemas = [schema_of(name, function, path) for name, function in described]
    except InputError as refused:
        link.say("refused", message=str(refused))
        return
    content = own_code.example(path).read_bytes()
    link.say("opened", schemas=schemas, digest=hashlib.sha256(content).hexdigest()[:16])
    calls = queue.SimpleQueue[dict[str, Any]]()

    def listen() -> None:
        try:
            while (message := link.read()) is not None:
                calls.put(message)
        finally:  # the trainer has gone, or gave up on a call, which may never end
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        call = calls.get()
        result = answer(functions, call["name"], call["arguments"], asked["most"])
        link.say("called", **result._asdict())

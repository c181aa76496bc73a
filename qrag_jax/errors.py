"""Errors that users can act on, and the rules of settings' fields that raise them."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple

_LONGEST, _HEAD, _TAIL = 4000, 2500, 1000  # characters of a message, and of what is kept of it


class InputError(ValueError):
    """Bad input; the message is one sentence that names the file, the field and the fix.

    Commands print only the message (no traceback) and exit with status 2. Of a message with a value
    of the input that is very long, the middle is left out. Marks of control are written as escapes,
    but for ends of lines.

    Whatever reads a config, a file or a folder raises it, so docstrings do not repeat it under
    "Raises".
    """

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            left_out = len(message) - _HEAD - _TAIL
            message = f"{message[:_HEAD]} … ({left_out} characters) … {message[-_TAIL:]}"
        # A few messages end with lines of a server's log.
        marks = (
            mark if (mark >= " " and mark != "\x7f") or mark == "\n" else repr(mark)[1:-1]
            for mark in message
        )
        super().__init__("".join(marks))


class FeedbackLost(RuntimeError):
    """No more rewards can be obtained; the message is one sentence for the user."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of packages that are optional: says what to install if one is missing."""
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"the package {error.name or error} is missing: run pip install 'qrag_jax[{extra}]'."
        ) from None


def library(module: str, extra: str) -> Any:
    """A package that is optional, imported when it is first used."""
    with needs(extra):
        return importlib.import_module(module)


# ---------------------------------------------------------------- rules of a field
# A field of a section has one next to its type, as in `steps: Count = 100`; `config_fields`
# checks it where a config enters.


class Rule(NamedTuple):
    """What the value of a field must be."""

    holds: Callable[[Any], Any]
    wanted: str  # the end of the sentence "config.NAME is VALUE; …"

    def __get_pydantic_core_schema__(self, kind: Any, read: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema  # which a command imports when it reads something

        def kept(value: Any) -> Any:
            if not self.holds(value):
                raise ValueError(self.wanted)
            return value

        return core_schema.no_info_after_validator_function(kept, read(kind))


def least(low: float) -> Rule:
    return Rule(lambda value: low <= value < 2**63, f"it must be at least {low}")


def within(low: float, high: float) -> Rule:
    return Rule(lambda value: low <= value <= high, f"it must be from {low} to {high}")


def one_of(names: Iterable[str]) -> Rule:
    known = tuple(names)
    return Rule(lambda value: value in known, f"use one of {', '.join(filter(None, known))}")


def some_of(names: Iterable[str], *, ordered: bool = False, empty: bool = False) -> Rule:
    """Some of these names, none twice."""
    known = tuple(names)

    def holds(value: tuple[str, ...]) -> bool:
        sound = {*value} <= {*known} and len({*value}) == len(value) and (empty or bool(value))
        return sound and (not ordered or [*value] == [name for name in known if name in value])

    how = ", in this order" if ordered else ", each once"
    return Rule(holds, f"use some of {', '.join(known)}{how}")


ABOVE_0 = Rule(lambda value: 0 < value < math.inf, "it must be above 0")
Count = Annotated[int, least(1)]
Natural = Annotated[int, least(0)]
Weight = Annotated[float, least(0)]
Positive = Annotated[float, ABOVE_0]
Share = Annotated[float, Rule(lambda value: 0 <= value <= 1, "use a share, 0 to 1")]
Part = Annotated[float, Rule(lambda value: 0 < value <= 1, "use a share above 0 and up to 1")]
Filled = Annotated[str, Rule(bool, "give one")]

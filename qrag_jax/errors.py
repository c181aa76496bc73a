"""Errors that users can act on, and the checks of settings that raise them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
        super().__init__("".join(map(_printable, message)))


class FeedbackLost(RuntimeError):
    """No more rewards can be obtained; the message is one sentence for the user."""


def _printable(mark: str) -> str:
    # A few messages end with lines of a server's log.
    return mark if (mark >= " " and mark != "\x7f") or mark == "\n" else repr(mark)[1:-1]


def check_least(section: str, settings: object, **least: float) -> None:
    """Refuses fields of `settings` that are too low.

    Args:
        section: the config section that holds the fields, such as "train".
        settings: the object that holds the values.
        least: the lowest value of each field, by name.
    """
    for name, low in least.items():
        value = getattr(settings, name)
        if not value >= low:
            raise InputError(f"config.{section}.{name} is {value}; it must be at least {low}.")


def check_above(section: str, settings: object, *names: str, low: float = 0) -> None:
    """Refuses fields of `settings` that are not above `low`."""
    for name in names:
        value = getattr(settings, name)
        if not value > low:
            raise InputError(f"config.{section}.{name} is {value}; it must be above {low}.")


def check_share(section: str, settings: object, *names: str) -> None:
    """Refuses fields of `settings` that are no share, a number from 0 to 1."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise InputError(f"config.{section}.{name} is {value}; use a share, 0 to 1.")


def check_known(section: str, settings: object, name: str, known: Iterable[str]) -> None:
    """Refuses a name that is not one of `known`."""
    value, known = getattr(settings, name), tuple(known)
    if value not in known:
        raise InputError(f"config.{section}.{name} is {value!r}; use one of {', '.join(known)}.")


# ---------------------------------------------------------------- rules of a field
# A field of a section has one beside its type, as in `steps: Count = 100`; `config_fields.fill`
# checks it where a config enters.


class Rule(NamedTuple):
    """What the value of a field must be."""

    holds: Callable[[Any], Any]
    wanted: str  # the end of the sentence "config.NAME is VALUE; …"


def least(low: float) -> Rule:
    """A finite number of at least `low`."""
    return Rule(lambda value: low <= value < math.inf, f"it must be at least {low}")


def within(low: float, high: float) -> Rule:
    """A number from `low` to `high`."""
    return Rule(lambda value: low <= value <= high, f"it must be from {low} to {high}")


def one_of(names: Iterable[str]) -> Rule:
    """One of these names."""
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


_ABOVE_0 = Rule(lambda value: 0 < value < math.inf, "it must be above 0")
Count = Annotated[int, least(1)]
Natural = Annotated[int, least(0)]
Weight = Annotated[float, least(0)]
Positive = Annotated[float, _ABOVE_0]
Share = Annotated[float, Rule(lambda value: 0 <= value <= 1, "use a share, 0 to 1")]
Filled = Annotated[str, Rule(bool, "give one")]

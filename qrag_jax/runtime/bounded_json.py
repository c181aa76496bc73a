"""Reads JSON of unknown origin: within limits, and with one kind of error for all that is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 2**20  # of a file that is read whole; notes and reports have a few kilobytes
_LONGEST = 60  # characters of a value in a message


class BadJSONError(ValueError):
    """A text is no JSON that can be used; the message is part of a sentence that says why."""


def parsed(data: bytes | str, *, finite: bool = True) -> Any:
    """The value that a text holds.

    `json.loads` takes numbers that are none, and tells of too deep a nesting with another error
    than of all else. Here there is one error.

    Args:
        finite: whether NaN and infinite numbers are refused, also those that are only too large.

    Raises:
        BadJSONError: the text is not UTF-8, no JSON, or nested too deep, or has such a number.
    """
    try:
        if not finite:
            return json.loads(data)
        return json.loads(data, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise BadJSONError("it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise BadJSONError(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise BadJSONError(f"{error.msg} at {place}") from None
    except ValueError as error:  # also of an integer with thousands of digits
        raise BadJSONError(str(error).partition(";")[0]) from None


def load(path: Path, *, finite: bool = True, most: int = MAX_BYTES) -> Any:
    """The value that a file holds; see `parsed`. Of one that is too large no more is read.

    Args:
        most: bytes that it may have.

    Raises:
        OSError: the file is missing or cannot be read.
        BadJSONError: it has more bytes, or what `parsed` refuses.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadJSONError(f"it has more than {most >> 20} MiB")
    return parsed(data, finite=finite)


def as_line(value: Any) -> bytes:
    """A value that `parsed` gave as JSON on one line."""
    return json.dumps(value).encode() + b"\n"


def shown(value: Any) -> str:
    """The value, cut short, as it may stand in a message."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deep nest"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")

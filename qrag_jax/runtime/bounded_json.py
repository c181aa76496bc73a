"""Reads JSON of unknown origin, and configs: of the kinds that are asked for, with one error.

pydantic does it, rather than msgspec: that one ignores unknown fields of dataclasses, has no rules
but its own, and says neither value nor place but in a text. Reading 100,000 rows of a log takes
pydantic 1.9 s and msgspec 1.1; importing takes 100 ms and 35, so it is imported when it is used.
"""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from qrag_jax.errors import InputError

# In a field's metadata: the code sets it, so no JSON and no config has it (under a name that
# pydantic reads, which is no name of a field); the dataclass of its section, where its type is
# wider.
INTERNAL = "validation_alias"
MAX_BYTES = 64 * 2**20  # of a file that is read whole; notes and reports have a few kilobytes
_LONGEST = 60  # characters of a value in a message
_STRICT: Any = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
_OF_UNION = re.compile(r"(str|int|float|bool|none|\w+\[.*\])$")  # pydantic's names of its parts

T = TypeVar("T")


class Foreign:
    """Base of a dataclass for the parts that are read of what others write; the rest is ignored."""

    __pydantic_config__ = _STRICT | {"extra": "ignore"}


class _FailFast:
    """The first wrong item is enough: a long reply may have millions."""

    def __get_pydantic_core_schema__(self, kind: Any, read: Callable[[Any], Any]) -> Any:
        return read(kind) | {"fail_fast": True}


Some = typing.Annotated[tuple[T, ...], _FailFast()]


class BadJSONError(ValueError):
    """A text is no JSON that can be used; the message is part of a sentence that says why.

    Of a value of a wrong kind it names the place, as in "hops[2].pool is 3; it should be …".
    """


def content(path: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a file that has `most` of them; may raise `OSError`."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadJSONError(f"it has more than {most >> 20} MiB")
    return data


def typed(kind: type[T], value: Any, place: str = "") -> T:
    """A value of this kind, of JSON text as bytes, or of what `dumped` takes, such as a config.

    Lists become tuples, and objects dataclasses, where the kind has these; named tuples are either.
    Fields with a default may be missing. A whole number is a number, too; true, false and texts are
    none; NaN and infinite ones are refused. `place` is the value's name, for messages.
    """
    data = value if isinstance(value, bytes) else dumped(value)
    try:
        return _adapter(typing.cast(Any, kind)).validate_json(b"[%b]" % data)[0]
    except ValueError as error:
        raise _refusal(error, place) from None


def dumped(value: Any, *, allow_nan: bool = True) -> bytes:
    """The value as JSON, of which `typed` makes it again, to the last bit.

    Of a surrogate pair's half, which models do write and UTF-8 lacks, it makes a question mark.
    """
    how: Any = {"allow_nan": allow_nan, "ensure_ascii": False, "default": plain}
    return json.dumps(value, **how).encode("utf-8", "replace")


def plain(value: Any) -> Any:
    """The value as JSON values; see `dumped`. A float32 is exact as a float64."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, fallback=_plain)


def shown(value: Any) -> str:
    """The value, cut short, as it may stand in a message."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        return "a deep nest"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _plain(value: Any) -> Any:
    """An array as a list, and a section of a config as an object."""
    return value.tolist() if hasattr(value, "tolist") else dict(value.items())


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[kind], config=_STRICT)  # a dataclass takes the config around it


def _refusal(error: Any, place: str) -> ValueError:
    unknown = ("unexpected_keyword_argument", "extra_forbidden")
    # A misspelt name rather than the one that is then missing.
    first = min(error.errors(include_url=False), key=lambda fault: fault["type"] not in unknown)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return cause
    if first["type"] == "json_invalid":
        return BadJSONError(f"{place or 'the whole'} is no JSON ({cause})")
    for step in first["loc"][1:]:
        if not _OF_UNION.match(str(step)):
            place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else step
    if first["type"] == "missing":
        return BadJSONError(f"{place or 'the whole'} is missing")
    if first["type"] in unknown:
        return BadJSONError(f"{place} is unknown; mend its name, or leave it out")
    said = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return BadJSONError(f"{place or 'the whole'} is {shown(first['input'])}; {said}")

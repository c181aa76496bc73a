"""Reads JSON of unknown origin, and configs: of the kinds that are asked for, with one error.

A dataclass does not look at what it is made of: a log with a text in the place of a number would be
read, and the command that adds the numbers up would fail.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from qrag_jax.errors import InputError

# In a field's metadata: the code sets it, so no JSON and no config has it; the dataclass of its
# section, where its type is wider.
INTERNAL = "internal"
MAX_BYTES = 64 * 2**20  # of a file that is read whole; notes and reports have a few kilobytes
_LONGEST = 60  # characters of a value in a message
_LARGEST = 2**63  # whole numbers below it fit into arrays
_KINDS = {str: "text", int: "whole number", float: "finite number", bool: "true or false"}

T = TypeVar("T")


class BadJSONError(ValueError):
    """A text is no JSON that can be used; the message is part of a sentence that says why.

    Of a value of a wrong kind it names the place, as in "hops[2].pool is 3, no list".
    """


def parsed(data: bytes | str, *, finite: bool = True) -> Any:
    """The value that a text holds; `json.loads` takes numbers that are none, and has many errors.

    With `finite` NaN and infinite numbers are refused, also those that are only too large.
    """
    try:
        if not finite:
            return json.loads(data)
        return json.loads(data, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise BadJSONError("it is nested too deep") from None
    except ValueError as error:  # also of bytes that are no UTF-8, or thousands of digits
        raise BadJSONError(str(error).partition(";")[0]) from None


def load(path: Path, *, finite: bool = True, most: int = MAX_BYTES) -> Any:
    """The value that a file of `most` bytes holds; see `parsed`. May raise `OSError`."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadJSONError(f"it has more than {most >> 20} MiB")
    return parsed(data, finite=finite)


def typed(kind: type[T], value: Any, place: str = "") -> T:
    """A value of this kind, made of one that `parsed` gave, or that a config has.

    Lists become tuples, and objects dataclasses or named tuples, where the kind has these. Fields
    with a default may be missing. `Annotated[np.ndarray, np.int32]` is an array of numbers. A whole
    number is a number, too; true and false are none; minus infinity is one, for a threshold that
    nothing misses. `place` is the value's name, for messages.
    """
    return typing.cast(T, _of(kind, value, place))


def plain(value: Any) -> Any:
    """The value as JSON values, of which `typed` makes it again, to the last bit.

    Records become objects and arrays lists; a float32 is exact as a float64.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def shown(value: Any) -> str:
    """The value, cut short, as it may stand in a message."""
    try:
        text = json.dumps(value, default=repr)
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


def _of(kind: Any, value: Any, place: str) -> Any:
    if kind is Any:
        return value
    if hasattr(kind, "__metadata__"):  # with rules (`errors.Rule`), or an array's type
        if isinstance(kind.__metadata__[0], type):
            import numpy as np  # which a tool's process does without

            return np.array(value, kind.__metadata__[0])
        found = _of(kind.__origin__, value, place)
        for rule in kind.__metadata__:
            if not rule.holds(found):
                raise BadJSONError(f"{place} is {shown(value)}; {rule.wanted}")
        return found
    if kind is None or kind is types.NoneType:
        return _kept(value, value is None, "null", place)
    if kind in _KINDS:
        return _kept(value, _is(kind, value), _KINDS[kind], place)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_field_defaults"):
        return _record(kind, value, place)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_of(typing.Literal[tuple(each.value for each in kind)], value, place))
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        if not any(type(value) is type(each) and value == each for each in inner):
            raise BadJSONError(
                f"{place} is {shown(value)}; use one of {', '.join(map(shown, inner))}"
            )
        return value
    if origin in (types.UnionType, typing.Union):
        wrong = []
        for each in inner:
            try:
                return _of(each, value, place)
            except BadJSONError as error:
                wrong.append(error)
        raise wrong[0]
    if origin in (list, tuple, collections.abc.Sequence):
        _kept(value, isinstance(value, list | tuple), "list", place)  # a config has tuples
        of_items = (inner or (Any,))[:1] * len(value)
        if origin is tuple and inner[1:] != (...,):
            _kept(value, len(value) == len(inner), "such list", place)
            of_items = inner
        pairs = enumerate(zip(of_items, value, strict=True))
        items = [_of(each, item, f"{place}[{n}]") for n, (each, item) in pairs]
        return tuple(items) if origin is tuple else items
    if origin in (dict, collections.abc.Mapping):
        _kept(value, hasattr(value, "items"), "object", place)
        kind_of = inner[1] if inner else Any
        return {key: _of(kind_of, item, f"{place}[{shown(key)}]") for key, item in value.items()}
    raise TypeError(f"{kind} is no kind of JSON")


def _is(kind: type, value: Any) -> bool:
    if kind in (int, float) and type(value) is int:
        return -_LARGEST <= value < _LARGEST
    # `parsed` refuses infinite numbers, if it is to; a config has minus infinity for a threshold.
    return type(value) is kind and (type(value) is not float or value < math.inf)


def _kept(value: Any, is_one: bool, name: str, place: str) -> Any:
    if not is_one:
        raise BadJSONError(f"{place or 'the whole'} is {shown(value)}, no {name}")
    return value


def _record(kind: Any, value: Any, place: str) -> Any:
    _kept(value, hasattr(value, "items"), "object", place)
    kinds, needed = _fields(kind)
    before = f"{place}." if place else ""
    for name in value:
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            raise BadJSONError(f"{before}{shown(name)[1:-1]} is unknown; there are {known}")
    for name in needed:
        if name not in value:
            raise BadJSONError(f"{before}{name} is missing")
    fields = {}
    for name, item in value.items():
        # A dataclass with names of its own in a section, such as those of data sources.
        read = getattr(kinds[name], "read", None)
        where = f"{before}{name}"
        fields[name] = read(item, where) if read else _of(kinds[name], item, where)
    try:
        return kind(**fields)
    except InputError:
        raise
    except ValueError as error:
        raise BadJSONError(f"{place or 'the whole'} cannot be: {error}") from None


@functools.cache
def _fields(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The kinds of the fields, and the names of those without a default."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if not dataclasses.is_dataclass(kind):
        return hints, tuple(name for name in hints if name not in kind._field_defaults)
    none = dataclasses.MISSING
    fields = [f for f in dataclasses.fields(kind) if f.init and INTERNAL not in f.metadata]
    needed = [f.name for f in fields if f.default is none and f.default_factory is none]
    return {f.name: hints[f.name] for f in fields}, tuple(needed)

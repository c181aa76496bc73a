"""Makes dataclasses, named tuples and tuples of JSON values, and checks each value's kind.

A dataclass does not look at what it is made of: a log with a text in the place of a number would be
read, and the command that adds the numbers up would fail. What is asked for here are the kinds that
the fields are annotated with.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from qrag_jax.runtime.bounded_json import shown

_LARGEST = 2**63  # whole numbers below it fit into arrays
_KINDS = {str: "text", int: "whole number", float: "finite number", bool: "true or false"}

Made = TypeVar("Made")


class WrongKindError(ValueError):
    """A value is not of its kind; the message names its place, as in "hops[2].pool is 3, no list".

    It is part of a sentence.
    """


def made(kind: type[Made], value: Any) -> Made:
    """A value of this kind.

    Lists become tuples, and objects dataclasses or named tuples, where the kind has these. Fields
    with a default may be missing. A whole number is a number, too; true and false are none.

    Args:
        kind: a dataclass or named tuple, whose fields are annotated with such kinds, `str`, `int`,
            `float`, `bool`, `None`, `Any`, `list`, `tuple`, `dict` or `Mapping`, or unions of them.
        value: as `bounded_json.parsed` gives it.

    Raises:
        WrongKindError: a value is of another kind, a field is missing or unknown, or the class
            refuses its values.
    """
    return typing.cast(Made, _of(kind, value, ""))


def _of(kind: Any, value: Any, place: str) -> Any:
    if kind is Any:
        return value
    if kind is None or kind is types.NoneType:
        return _kept(value, value is None, "null", place)
    if kind in _KINDS:
        return _kept(value, _is(kind, value), _KINDS[kind], place)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_field_defaults"):
        return _record(kind, value, place)
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(inner, value, place)
    if origin is tuple and inner[1:] != (...,):
        _kept(value, isinstance(value, list) and len(value) == len(inner), "such list", place)
        pairs = enumerate(zip(inner, value, strict=True))
        return tuple(_of(each, item, f"{place}[{n}]") for n, (each, item) in pairs)
    if origin in (list, tuple, collections.abc.Sequence):
        _kept(value, isinstance(value, list), "list", place)
        kind_of = inner[0] if inner else Any
        items = [_of(kind_of, item, f"{place}[{n}]") for n, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin in (dict, collections.abc.Mapping):
        _kept(value, isinstance(value, dict), "object", place)
        kind_of = inner[1] if inner else Any
        return {key: _of(kind_of, item, f"{place}[{shown(key)}]") for key, item in value.items()}
    raise TypeError(f"{kind} is no kind of JSON")


def _is(kind: type, value: Any) -> bool:
    if kind is float and type(value) is float:
        return math.isfinite(value)
    if kind in (int, float):
        return type(value) is int and -_LARGEST <= value < _LARGEST
    return type(value) is kind


def _kept(value: Any, is_one: bool, name: str, place: str) -> Any:
    if not is_one:
        raise WrongKindError(f"{place or 'the whole'} is {shown(value)}, no {name}")
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    wrong = []
    for kind in kinds:
        try:
            return _of(kind, value, place)
        except WrongKindError as error:
            wrong.append(error)
    raise wrong[0]


def _record(kind: Any, value: Any, place: str) -> Any:
    _kept(value, isinstance(value, dict), "object", place)
    kinds, needed = _fields(kind)
    before = f"{place}." if place else ""
    for name in value:
        if name not in kinds:
            raise WrongKindError(f"the field {before}{shown(name)[1:-1]} is unknown")
    for name in needed:
        if name not in value:
            raise WrongKindError(f"the field {before}{name} is missing")
    fields = {name: _of(kinds[name], item, f"{before}{name}") for name, item in value.items()}
    try:
        return kind(**fields)
    except ValueError as error:
        raise WrongKindError(f"{place or 'the whole'} cannot be: {error}") from None


@functools.lru_cache(maxsize=64)
def _fields(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The kinds of the fields, and the names of those without a default."""
    hints = typing.get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        return hints, tuple(name for name in hints if name not in kind._field_defaults)
    none = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(kind) if field.init]
    needed = [f.name for f in fields if f.default is none and f.default_factory is none]
    return {field.name: hints[field.name] for field in fields}, tuple(needed)

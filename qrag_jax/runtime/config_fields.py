"""Builds config sections from dataclasses, so defaults, types and comments are written only once.

`internal` makes a field that no config has, because the code sets it. The comment of a field stands
behind it or on the lines above it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from qrag_jax.errors import InputError
from qrag_jax.runtime.bounded_json import INTERNAL, BadJSONError, typed
from qrag_jax.runtime.whole_files import reading

T = TypeVar("T")
_FIX = "compare it with --help, or restore it from a backup"
# Comments on the lines above, a field's name, and the comment behind it. No default holds a "#".
_FIELD = re.compile(r"((?:^    #.*\n)*)^    (\w+): [^#\n]*(?:# (.*))?$", re.MULTILINE)


def internal(default: Any = None, *, factory: Callable[[], Any] | None = None) -> Any:
    """A field of a dataclass that is in no config, with its default, or what makes it."""
    metadata = {INTERNAL: " "}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def refusing_types(what: object, fix: str = _FIX) -> Any:
    """A block, or a decorated function, that reads a config, whose values may be of any type."""
    wrong = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError)
    return reading(what, fix, wrong)


def fields_of(settings: type) -> list[dataclasses.Field]:
    """The fields that a config has."""
    return [field for field in dataclasses.fields(settings) if INTERNAL not in field.metadata]


def typed_fields(settings: type) -> Iterator[tuple[dataclasses.Field, Any, Any]]:
    """The fields that a config has, each with its type and the dataclass in it, or None."""
    hints = typing.get_type_hints(settings, include_extras=True)
    for field in fields_of(settings):
        nested = next(filter(dataclasses.is_dataclass, kinds_of(hints[field.name])), None)
        yield field, hints[field.name], nested


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type, with their rules."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _bare(kind: Any) -> Any:
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


def section(settings: type, **values: Any) -> ConfigDict:
    """The config section for a dataclass, with its defaults, or `values` in their place."""
    result = ConfigDict()
    for field, kind, nested in typed_fields(settings):
        value = _default(field)
        others = [_bare(each) for each in kinds_of(kind) if each is not types.NoneType]
        if nested is not None:
            value = section(nested)
        elif len(others) > 1:  # a reference gives ConfigDict the type if the default does not
            value = FieldReference(value, field_type=object)
        elif value is None:
            value = placeholder(others[0])
        result[field.name] = value
    result.update(values)
    return result


def fill(settings: type[T], given: Mapping[str, Any], place: str = "") -> T:
    """Builds the dataclass of a section; fields that are not given keep their defaults.

    A field must have its type and keep its rules (`errors.Rule`), see `bounded_json.typed`.

    Args:
        place: the section's name, for messages: "train", "encoder.lora"; "": the whole config.
    """
    return check_value(settings, given, f"config.{place}" if place else "config")


def check(settings: Any, prefix: str) -> None:
    """Checks a dataclass that no config has filled; `prefix` is before the fields' names."""
    for field, kind, nested in typed_fields(type(settings)):
        if nested is None:
            check_value(kind, getattr(settings, field.name), f"{prefix}{field.name}")


def check_value(kind: Any, value: Any, name: str) -> Any:
    """The value of a field, which is refused if it is of no such type or breaks a rule."""
    try:
        return typed(kind, value, name)
    except BadJSONError as error:
        raise InputError(f"{error}.") from None


def described(settings: type, place: str) -> list[tuple[str, Any, str]]:
    """Name, default and comment of every field, including those of nested sections."""
    lines: list[tuple[str, Any, str]] = []
    for field, _, nested in typed_fields(settings):
        name = f"{place}.{field.name}" if place else field.name
        if nested is not None:
            lines += described(nested, name)
        else:
            lines.append((name, _default(field), comments(settings).get(field.name, "")))
    return lines + (settings.further_help(place) if hasattr(settings, "further_help") else [])


@functools.cache
def comments(settings: type) -> dict[str, str]:
    """The comment of each field, including the fields of base classes."""
    found: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(settings.__mro__)):
        for above, name, behind in _FIELD.findall(inspect.getsource(cls)):
            lines = [*re.findall(r"# ?(.*)", above), *([behind] if behind else [])]
            if lines and name in cls.__annotations__:
                found[name] = " ".join(lines)
    return found


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()
